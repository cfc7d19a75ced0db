"""A stand-in for the kernel of flash-linear-attention, which needs a GPU: the same signature, by the specification."""

import numpy as np
import torch

from treetrain.linear_attention.reference import reference_gated_delta


class StandIn:
    """The signature of `chunk_gated_delta_rule` by the specification; notes what it was asked."""

    def __init__(self):
        self.calls: list[dict] = []

    def __call__(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
    ):
        assert use_qk_l2norm_in_kernel and scale is None and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert initial_state.shape[0] == len(cu_seqlens) - 1 and q.shape[0] == 1
        outs, states = [], []
        for run, (first, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist())):
            assert stop > first
            chain = np.arange(-1, stop - first - 1)
            piece = [x[0, first:stop].to(initial_state.dtype) for x in (q, k, v, g, beta)]
            out, after = reference_gated_delta(*piece, chain, initial_state[run])
            outs.append(out.to(v.dtype))
            states.append(after[-1])
        self.calls.append({"runs": len(states), "tokens": q.shape[1], "final": output_final_state})
        return torch.cat(outs)[None], torch.stack(states) if output_final_state else None
