"""Part of the target as a drafter inside captured rounds: the twin of what ``self_chain.py`` and ``self_growth.py`` do."""

from __future__ import annotations

from typing import Any, cast

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.interfaces import Target
from outrider.core.route import Route
from outrider.drafters.trees.shape import TreeShape
from outrider.models.adapter import Adapter
from outrider.models.rank_sums import ALONE


def exit_twin(
    route: Route, shape: CapturedShape, target: Target, *, tree: TreeShape | None = None, threshold: float | None = None
) -> DeviceDrafter | None:
    """The sublayers of ``route`` as part of a captured round. They draft chains that end after a guess below the ``threshold``,
    or trees. None if the target is divided, because its other ranks know whole passes only."""
    fast = cast(Any, target)
    if fast.joint is not ALONE or not shape.guesses:
        return None
    from outrider.device.drafters.itself.exits import DeviceExit  # needs triton
    from outrider.device.drafters.trees.growers import ChainGrower, Spoken, StaticGrower

    spoken = Spoken(target.vocab_size)
    if tree is None:
        return DeviceExit(fast, route, ChainGrower(spoken, shape.depth, threshold=threshold))
    within = shape.within(tree.max_depth).guesses
    trees = {depth: tree.within(count, depth) for depth, count in within.items()}
    ranked = {depth: (grown.parents, grown.ranks) for depth, grown in trees.items()}
    return DeviceExit(fast, route, StaticGrower(spoken, target.device, ranked))


def adapted_twin(
    adapter: Adapter, route: Route, shape: CapturedShape, target: Target, *, threshold: float
) -> DeviceDrafter | None:
    """``exit_twin`` through a trained layer, which has pages of its own for its keys; None if kernels do not support the
    layer."""
    fast = cast(Any, target)
    if fast.joint is not ALONE or not shape.guesses:
        return None
    from outrider.device.drafters.heads.slots import DeviceHeads  # needs triton
    from outrider.device.drafters.itself.exits import AdapterMemory
    from outrider.device.drafters.trees.growers import ChainGrower, Spoken

    if not AdapterMemory.can_hold(adapter.config):
        return None
    grower, memory = (
        ChainGrower(Spoken(target.vocab_size), shape.depth, threshold=threshold),
        AdapterMemory(adapter, fast, route),
    )
    return DeviceHeads(adapter, adapter.taps, fast, grower, memory)
