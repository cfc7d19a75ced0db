"""How a split is launched: the command of torchrun, accelerate's file, and the mesh in a loop of one's own."""

from typing import NamedTuple

from treetrain.simulation.splits import Split

ENDPOINT = "$HEAD:29400"
"""`HEAD` is the name of one node, the same on all."""


class Launch(NamedTuple):
    """How to start a split, as text."""

    command: str
    """Of torchrun, to be run on every node."""
    accelerate: str | None
    """A file for `accelerate launch --config_file`; None for a split that trainers do not take."""
    mesh: str | None
    """Lines of a loop of one's own; None for a split that `treetrain train` takes."""


def in_trainers(split: Split) -> bool:
    """Whether `TreeTrainer` and `share_prefixes` take it: data parallel, with whole weights or over all ranks."""
    return split.tensor == split.context == split.expert == 1 and split.shards in (1, split.ranks)


def launch_of(
    split: Split, nodes: int, *, model: str, files: str, budget: int | str | None, checkpointing: bool, cpu: bool
) -> Launch:
    """How to start a split that `TreeEngine` supports.

    Args:
        nodes: equal ones, over which the ranks are spread.
        model: what `--model` was; files: of rows, as words of a command line.
        budget: of every rank; None leaves it to the device.
        checkpointing: whether every layer keeps its input alone.
        cpu: whether ranks are processes without a GPU.
    """
    rendezvous = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint {ENDPOINT} --rdzv-id run1 "
    start = f"torchrun {rendezvous if nodes > 1 else ''}--nproc-per-node {split.ranks // nodes}"
    if not in_trainers(split):
        return Launch(f"{start} your_loop.py", None, _mesh(split, budget, cpu))
    words = [f"--model {model}", "--output_dir out", "--resume_from_checkpoint true"]
    words += ["--fsdp"] * (split.shards > 1)
    words += [f"--budget {budget}"] * (budget is not None) + ["--gradient_checkpointing true"] * checkpointing
    words += ["--use_cpu true --ddp_backend gloo"] * cpu
    return Launch(
        f"{start} -m treetrain train {files} {' '.join(words)}", _accelerate(split, nodes, checkpointing, cpu), None
    )


def _accelerate(split: Split, nodes: int, checkpointing: bool, cpu: bool) -> str:
    kind = "FSDP" if split.shards > 1 else ("MULTI_CPU" if cpu else "MULTI_GPU")
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {kind if split.ranks > 1 else 'NO'}"]
    if split.shards > 1:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true",
            "  fsdp_state_dict_type: FULL_STATE_DICT",
            f"  fsdp_activation_checkpointing: {str(checkpointing).lower()}",
        ]
    lines += ["mixed_precision: 'no'", f"num_machines: {nodes}", f"num_processes: {split.ranks}"]
    if nodes > 1:
        lines += ["rdzv_backend: c10d", "main_process_ip: HEAD  # the name of one node", "main_process_port: 29400"]
        lines += ["machine_rank: 0"]
    return "\n".join([*lines, f"use_cpu: {str(cpu).lower()}"])


def _mesh(split: Split, budget: int | str | None, cpu: bool) -> str:
    """The lines that differ from examples/fsdp2.py."""
    kind, bound = ("cpu" if cpu else "cuda"), "" if budget is None else f", budget={budget!r}"
    if split.tensor > 1:
        experts = f", ep_size={split.expert}" if split.expert > 1 else ""
        return (
            f'plan = DistributedConfig(tp_plan="auto", tp_size={split.tensor}{experts})  # transformers.distributed\n'
            f'model = AutoModelForCausalLM.from_pretrained("...", distributed_config=plan)\n'
            f"engine = tt.TreeEngine(model{bound})"
        )
    names = ("copies", "shards") if split.context == 1 else ("data", "context")
    sizes = (split.copies, split.shards) if split.context == 1 else (split.data, split.context)
    lines = [f'mesh = init_device_mesh("{kind}", {sizes}, mesh_dim_names={names})']
    given = f', context=mesh.get_group("context"){bound}' if split.context > 1 else bound
    if split.shards == 1:
        return "\n".join([*lines, f"engine = tt.TreeEngine(model, group=dist.group.WORLD{given})"])
    over = "mesh" if split.shards < split.ranks else f"mesh[{names}]._flatten()"
    lines.append(f"fully_shard(model, mesh={over})  # and before it every layer")
    return "\n".join([*lines, f"engine = tt.TreeEngine(model{given})"])
