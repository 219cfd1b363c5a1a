"""log_probs: values, gradients and memory beside torch's log_softmax."""

from __future__ import annotations

import pytest
import torch

from memtools import _core
from memtools._base.libraries import library_paths
from memtools.grad import log_probs

WIDTH, CLASSES = 8, 31


def made(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, has_bias: bool = False):
    torch.manual_seed(0)
    hidden = torch.randn(*shape, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, dtype=dtype, requires_grad=True)
    bias = torch.randn(CLASSES, dtype=dtype, requires_grad=True) if has_bias else None
    labels = torch.randint(0, CLASSES, shape)
    labels.view(-1)[1] = -100
    return hidden, weight, bias, labels


def plain(hidden, weight, bias, labels):
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    chosen = torch.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen * (labels != -100)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("shape", [(13,), (3, 7)])
def test_values_and_gradients_are_those_of_log_softmax(shape, chunk_tokens, has_bias):
    results = []
    for way in (plain, lambda *inputs: log_probs(*inputs[:2], inputs[3], bias=inputs[2],
                                                 chunk_tokens=chunk_tokens)):  # fmt: skip
        inputs = made(shape, has_bias=has_bias)
        chosen = way(*inputs)
        (chosen * torch.linspace(-1, 1, chosen.numel()).view(shape)).sum().backward()
        results.append([chosen, *(one.grad for one in inputs[:3] if one is not None)])
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_lower_precision_is_as_precise_as_torchs(way):
    exact, results = made((64,)), []
    wanted = plain(*exact)
    wanted.sum().backward()
    for function in (plain, lambda h, w, b, y: log_probs(h, w, y, chunk_tokens=16)):
        dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
        hidden, weight, bias, labels = made((64,))
        hidden, weight = (one.detach().to(dtype).requires_grad_() for one in (hidden, weight))
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            chosen = function(hidden, weight, bias, labels)
        chosen.sum().backward()
        assert weight.grad.dtype == dtype
        results.append([float((chosen - wanted).detach().abs().max()),
                        float((weight.grad - exact[1].grad).abs().max())])  # fmt: skip
    theirs, ours = results
    assert ours[0] <= 1.5 * theirs[0] + 1e-3
    assert ours[1] <= 1.5 * theirs[1] + 1e-3


def test_it_holds_the_logits_of_one_chunk():
    torch.manual_seed(0)
    tokens, classes, chunk = 1024, 4096, 64
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(classes, WIDTH, requires_grad=True)
    labels = torch.randint(0, classes, (tokens,))

    def peak(function) -> int:
        hidden.grad = weight.grad = None
        blocks = _core.Blocks()
        blocks.start(library_paths())
        blocks.record(True)
        function().sum().backward()
        blocks.record(False)
        contents = blocks.contents()
        blocks.stop()
        assert contents is not None
        return contents.peak_bytes

    ours = peak(lambda: log_probs(hidden, weight, labels, chunk_tokens=chunk))
    assert ours < 3 * chunk * classes * 4 + 2 * weight.nbytes
    assert peak(lambda: plain(hidden, weight, None, labels)) > 5 * ours


REFUSED = {
    "labels must be integers": (lambda: made((4,))[:2], torch.ones(4), {}),
    r"hidden is \[4, 8\]": (lambda: made((4,))[:2], torch.ones(5, dtype=torch.long), {}),
    "a label is 31, and there are 31 classes": (
        lambda: made((4,))[:2], torch.full((4,), 31), {}),
    "bias is": (lambda: made((4,))[:2], torch.ones(4, dtype=torch.long), {"bias": torch.ones(3)}),
    "chunk_tokens": (lambda: made((4,))[:2], torch.ones(4, dtype=torch.long), {"chunk_tokens": 0}),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_bad_input_is_refused(why):
    make, labels, options = REFUSED[why]
    with pytest.raises((ValueError, TypeError), match=why):
        log_probs(*make(), labels, **options)
