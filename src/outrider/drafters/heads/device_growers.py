"""How the trees of heads grow inside captured rounds: the twin of what ``HeadDrafter`` does on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.interfaces import Target
from outrider.drafters.trees.options import BestFirstOptions
from outrider.drafters.trees.shape import TreeShape
from outrider.models.heads import Head
from outrider.models.heads.longspec import LongSpecHead

if TYPE_CHECKING:
    from outrider.device.drafters.heads.memory import HeadMemory
    from outrider.device.drafters.trees.growers import Choose, Grower


def device_heads(head: Head, target: Target, grower: Grower, memory: HeadMemory) -> DeviceDrafter:
    """Heads as part of a captured round."""
    from outrider.device.drafters.heads.slots import DeviceHeads  # needs triton

    return DeviceHeads(head, head.config.taps, cast(Any, target), grower, memory)


def longspec_twin(head: LongSpecHead, grower: Grower, target: Target) -> DeviceDrafter | None:
    """LongSpec as part of a captured round, if it knows the layout of the target's pages."""
    from outrider.device.drafters.heads.longspec import DeviceLongSpec  # needs triton

    known = kernels_know(head) and DeviceLongSpec.can_read(head, cast(Any, target))
    return DeviceLongSpec(head, cast(Any, target), grower) if known else None


def kernels_know(head: Head) -> bool:
    """Whether the layers of a head can run inside captured rounds."""
    from outrider.device.drafters.heads.memory import LayerMemory  # needs triton

    return LayerMemory.can_hold(head.config.layer)


def device_grower(
    head: Head,
    shape: CapturedShape,
    target: Target,
    *,
    static: TreeShape | None,
    search: BestFirstOptions | None,
    choose: Choose | None = None,
) -> Grower | None:
    """Grows chains, trees of a ``static`` shape, or best-first trees; None if none of these applies or the tree is too
    large. ``choose`` replaces the usual way of building a tree from a best-first search."""
    from outrider.device.drafters.trees.best_first import Growth, searches_of  # needs triton
    from outrider.device.drafters.trees.growers import BestFirstGrower, ChainGrower, Spoken, StaticGrower

    whole = head.config.draft_vocab_size == head.config.vocab_size
    size = min(head.config.draft_vocab_size, target.vocab_size) if whole else head.config.draft_vocab_size
    spoken = Spoken(size, None if whole else head.target_ids)
    if static is not None:
        shape = shape.within(static.max_depth)
        if static.is_chain:
            return ChainGrower(spoken, shape.depth)
        trees = {depth: static.within(count, depth) for depth, count in shape.guesses.items()}
        return StaticGrower(spoken, target.device, {depth: (tree.parents, tree.ranks) for depth, tree in trees.items()})
    if search is None:
        return None
    searches = searches_of(shape, width=search.width, num_children=search.num_children, tau=search.tau)
    return BestFirstGrower(spoken, target.device, searches, choose=choose or Growth.choose) if searches else None
