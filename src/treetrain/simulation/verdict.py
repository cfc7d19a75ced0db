"""The sentences under the table of `treetrain simulate`."""

from collections.abc import Iterator, Sequence

from treetrain.core.planning.devices import Device
from treetrain.simulation.simulate import Refused, Simulation


def verdict(
    found: Sequence[Simulation | Refused], device: Device, linear: Sequence[Simulation | Refused] = ()
) -> Iterator[str]:
    """Say which split is fastest and why, what the tree gains, and how copies compare with shards over all ranks.

    Args:
        linear: the same tokens trained row by row, on splits of the same ranks.
    """
    done = sorted((one for one in found if isinstance(one, Simulation)), key=lambda one: one.step_seconds)
    if not done:
        return
    best = done[0]
    split, spent = best.split, best.step_seconds
    others = [one for one in done if one.split[1:3] != split[1:3]]
    said = f"Fastest: {split}: {spent:.3g} s a step, {best.link_share:.0%} of it links"
    said += f" and {best.waiting_seconds / spent:.0%} waiting" if best.waiting_seconds > 0.005 * spent else ""
    if others:
        other, slower = others[0], others[0].step_seconds / spent
        reasons = {
            "arithmetic and balance": other.work_seconds - best.work_seconds,
            "waiting": other.waiting_seconds - best.waiting_seconds,
            "links": sum(other.link_seconds.values()) - sum(best.link_seconds.values()),
        }
        reason = max(reasons, key=lambda name: reasons[name])
        said += f"; {other.split} takes {slower:.2f} times as long, mostly by {reason}"
    yield said + "."
    apart = min((one for one in linear if isinstance(one, Simulation)), key=lambda one: one.step_seconds, default=None)
    if apart is not None:
        ratio = f"{apart.step_seconds / spent:.2f} times as long, {apart.step_seconds:.3g} s"
        yield f"Without a tree, the rows that no other row extends take {ratio} on {apart.split}, each row by itself."
    elif linear:
        yield "Without a tree, the rows that no other row extends fit into the memory of none of these splits."
    here = next((one for one in done if one.split.in_engine), None)
    if here is not None and here is not best:
        yield (
            f"TreeEngine does not combine these yet; the fastest that it runs is {here.split}: {here.step_seconds:.3g} "
            "s. tt.attention brings tree attention into a framework that does."
        )
    same = {one.split.shards: one for one in done if one.split[:4] == split[:4]}
    node, whole = int(device.node_ranks) // split.tensor, split.ranks // split.tensor
    if split.ranks <= device.node_ranks or device.node_ranks == 1:
        return
    if node in same and whole in same:
        inside, over = same[node].step_seconds, same[whole].step_seconds
        better, worse = ("better", over / inside) if inside < over else ("worse", inside / over)
        yield (
            f"A copy of the weights in every node of {int(device.node_ranks)} ranks (hybrid sharding) is {better} than "
            f"one over all {split.ranks}: {inside:.3g} s against {over:.3g} s, {worse:.2f} times."
        )
    elif whole in same:
        yield f"A copy of the weights in every node of {int(device.node_ranks)} ranks does not fit into the memory."
