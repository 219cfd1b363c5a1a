"""The log-probability of each label without the logits of all tokens.

hidden [tokens, width] ─┬─ chunk ─► logits [chunk, vocabulary] ─► one number a token
                        ├─ chunk ─► ...                            the logits are freed
                        └─ ...
backward                   chunk ─► logits again ─► gradients of hidden and weight
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.number import whole_number

if TYPE_CHECKING:
    import torch

__all__ = ["log_probs"]


def log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    chunk_tokens: int = 128,
) -> torch.Tensor:
    """Return the log-probability of each label, in chunks of tokens.

        hidden = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
        chosen = memtools.grad.log_probs(hidden, model.lm_head.weight, input_ids[:, 1:])

    It is log_softmax(hidden @ weight.T + bias) at the labels, with the logits of one chunk in
    memory. The backward pass recomputes them: four products of the head's size instead of three.
    The logarithm is in float32, also under autocast.

    Args:
        hidden: `[..., width]`, floating point: the last hidden states.
        weight: `[vocabulary, width]`: the weight of the head.
        labels: `[...]`, int64: a class for each token, or `ignore_index`.
        bias: `[vocabulary]`.
        ignore_index: the label of tokens without a class, whose result is 0.
        chunk_tokens: tokens in a chunk.

    Returns a float32 tensor `[...]`. It cannot be differentiated twice.

    Raises ValueError if the shapes do not match or a label is not a class; TypeError if labels are
    not integers.
    """
    torch = bridge.connect().torch
    chunk_tokens = whole_number("chunk_tokens", chunk_tokens)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")
    fits = hidden.shape[:-1] == labels.shape and weight.shape[1:] == hidden.shape[-1:]
    if hidden.dim() == 0 or weight.dim() != 2 or not fits:
        raise ValueError(
            f"hidden is {list(hidden.shape)}, weight {list(weight.shape)} and labels "
            f"{list(labels.shape)}; they must be [..., width], [vocabulary, width] and [...]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias is {list(bias.shape)}, for {len(weight):,} classes")
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    flat = labels.reshape(-1)
    wrong = ((flat < 0) | (flat >= len(weight))) & (flat != ignore_index)
    if bool(wrong.any()):
        label = int(flat[wrong][0])
        raise ValueError(f"a label is {label}, and there are {len(weight):,} classes")
    function = _function(torch)
    chosen = function.apply(
        hidden.reshape(len(flat), -1), weight, bias, flat, ignore_index, chunk_tokens
    )
    return chosen.reshape(labels.shape)  # type: ignore[no-any-return]


@functools.cache
def _function(torch: Any) -> Any:
    """The autograd function, which needs torch when it is defined."""

    def logits_of(hidden: Any, weight: Any, bias: Any) -> Any:
        made = (hidden @ weight.T).float()
        return made if bias is None else made.add_(bias)

    class LogProbs(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(
            ctx: Any, hidden: Any, weight: Any, bias: Any, labels: Any, ignored: int, size: int
        ) -> Any:
            chosen, norms = (torch.empty(len(labels), device=hidden.device) for _ in range(2))
            kept = labels != ignored
            classes = labels.where(kept, 0)
            for at in range(0, len(labels), size):
                part = slice(at, at + size)
                logits = logits_of(hidden[part], weight, bias)
                norms[part] = logits.logsumexp(1)
                chosen[part] = logits.gather(1, classes[part, None])[:, 0]
            ctx.save_for_backward(hidden, weight, bias, classes, kept, norms)
            ctx.size = size
            return (chosen - norms) * kept

        @staticmethod
        @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
        def backward(ctx: Any, gradient: Any) -> Any:
            hidden, weight, bias, classes, kept, norms = ctx.saved_tensors
            of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
            gradient = gradient * kept
            hiddens = torch.empty_like(hidden) if of_hidden else None
            weights = torch.zeros_like(weight, dtype=torch.float32) if of_weight else None
            biases = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
            for at in range(0, len(classes), ctx.size):
                part = slice(at, at + ctx.size)
                # -softmax, and 1 more at the class, times the gradient of the token
                grads = logits_of(hidden[part], weight, bias).sub_(norms[part, None]).exp_().neg_()
                grads.scatter_add_(1, classes[part, None], torch.ones_like(norms[part, None]))
                grads.mul_(gradient[part, None])
                if biases is not None:
                    biases += grads.sum(0)
                grads = grads.to(hidden.dtype)
                if hiddens is not None:
                    hiddens[part] = grads @ weight
                if weights is not None and weights.dtype == grads.dtype:
                    weights.addmm_(grads.T, hidden[part])
                elif weights is not None:
                    weights += grads.T @ hidden[part]
            if weights is not None:
                weights = weights.to(weight.dtype)
            if biases is not None:
                biases = biases.to(bias.dtype)
            return hiddens, weights, biases, None, None, None

    return LogProbs
