"""How the trees of heads grow inside captured rounds: the twin of what ``HeadDrafter`` does on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from outrider.core.device_round import CapturedShape, DeviceDrafter
from outrider.core.interfaces import Target
from outrider.drafters.heads.head_drafter import HeadDrafter
from outrider.models.heads import Head

if TYPE_CHECKING:
    from outrider.models.gpu.growers import Choose, Grower
    from outrider.models.gpu.head_memory import HeadMemory


def device_heads(head: Head, target: Target, grower: Grower, memory: HeadMemory) -> DeviceDrafter:
    """Heads as part of a captured round."""
    from outrider.models.gpu.device_heads import DeviceHeads  # needs triton

    return DeviceHeads(head, cast(Any, target), grower, memory)


def device_grower(
    drafter: HeadDrafter, head: Head, shape: CapturedShape, target: Target, *, choose: Choose | None = None
) -> Grower | None:
    """Grows the drafter's trees, or its chains where their length changes from round to round; None where it has neither, or
    they are not ranked with the noise. ``choose`` makes trees of what a best-first search has looked at, where it is not the
    usual way."""
    from outrider.models.gpu.best_first import Growth, search_of  # needs triton
    from outrider.models.gpu.growers import BestFirstGrower, ChainGrower, Spoken, StaticGrower

    whole = head.config.draft_vocab_size == head.config.vocab_size
    size = min(head.config.draft_vocab_size, target.vocab_size) if whole else head.config.draft_vocab_size
    spoken = Spoken(size, None if whole else head.target_ids)
    depth, options = min(shape.depth, drafter.max_depth or shape.depth), drafter.search
    if shape.nodes is None:
        is_chain = drafter.static_tree is not None and drafter.static_tree.is_chain
        return ChainGrower(spoken, depth) if is_chain else None
    if drafter.static_tree is not None:
        tree = drafter.static_tree.within(shape.nodes, depth)
        return StaticGrower(spoken, target.device, parents=tree.parents, ranks=tree.ranks)
    if options is None:
        return None
    sized = CapturedShape(depth, shape.nodes)
    search = search_of(sized, width=options.width, num_children=options.num_children, tau=options.tau)
    if not search.fits:
        return None
    return BestFirstGrower(spoken, target.device, search=search, choose=choose or Growth.choose)
