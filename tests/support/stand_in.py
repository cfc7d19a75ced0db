"""A stand-in for kernels of flash-linear-attention, which need a GPU: the same signatures, by the specifications."""

import numpy as np
import torch

from treetrain.layers.recurrence.reference import reference_gated_delta, reference_state_space


class StandIn:
    """`chunk_gated_delta_rule`, or without beta `chunk_simple_gla`, by the specification; notes what it was asked."""

    def __init__(self):
        self.calls: list[dict] = []

    def __call__(
        self,
        q,
        k,
        v,
        g,
        beta=None,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        assert torch.equal(cu_seqlens, cu_seqlens_cpu) and q.dtype == k.dtype == v.dtype
        assert initial_state.shape[0] == len(cu_seqlens) - 1 and q.shape[0] == 1
        given, reference = [q, k, v, g], reference_state_space
        if beta is None:
            assert scale == 1.0 and not use_qk_l2norm_in_kernel and q.shape[2] == v.shape[2]
        else:
            assert scale is None and use_qk_l2norm_in_kernel
            given, reference = [*given, beta], reference_gated_delta
        outs, states = [], []
        for run, (first, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
            assert stop > first
            chain = np.arange(-1, stop - first - 1)
            piece = [x[0, first:stop].to(initial_state.dtype) for x in given]
            out, after = reference(*piece, chain, initial_state[run])
            outs.append(out.to(v.dtype))
            states.append(after[-1])
        self.calls.append({"runs": len(states), "tokens": q.shape[1], "final": output_final_state})
        return torch.cat(outs)[None], torch.stack(states) if output_final_state else None
