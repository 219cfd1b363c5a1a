"""Secrets of command lines and error texts are masked, and nothing else is."""

from __future__ import annotations

import pytest

from memtools._redact import redacted, redacted_command

MASKED = {
    "an option with =": (["train.py", "--api-key=abc"], ["train.py", "--api-key=***"]),
    "an option and its value": (["--token", "abc", "x"], ["--token", "***", "x"]),
    "one dash": (["-password", "a b c"], ["-password", "***"]),
    "a value of several words": (["--db.password=my own words"], ["--db.password=***"]),
    "a variable": (["env", "HF_TOKEN=abc", "x"], ["env", "HF_TOKEN=***", "x"]),
    "another": (["AWS_SECRET_ACCESS_KEY=abc"], ["AWS_SECRET_ACCESS_KEY=***"]),
    "camel case": (["--clientSecret=abc", "--apiKey", "x"],
                   ["--clientSecret=***", "--apiKey", "***"]),
    "an option without value": (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
    "a key alone": (["hf_abcDEF0123456789xyzXYZ"], ["***"]),
    "a key in a text": (["key is sk-proj-abcdef123456."], ["key is ***."]),
    "a user in an address": (["https://me:abc@host/x"], ["https://***@host/x"]),
    "a program": (["-c", "login(token='abc', n=1)"], ["-c", "login(token=***, n=1)"]),
    "a shell's line": (["sh", "-c", "x --token abc -v"], ["sh", "-c", "x --token *** -v"]),
    "a header": (["-H", "Authorization: Bearer abcdef123"], ["-H", "Authorization: *** ***"]),
    "JSON": (['{"api_key": "abc", "n": 1}'], ['{"api_key": ***, "n": 1}']),
}  # fmt: skip
KEPT = [
    ["/usr/bin/python3", "train.py", "--lr", "3e-4", "--max-tokens", "512"],
    ["--tokenizer", "gpt2", "--num_tokens=5", "--key", "x", "--tokens-per-step=1"],
    ["torchrun", "--nproc-per-node=2", "-m", "pkg.train", "--out=/data/runs/3"],
    ["-c", "for step in range(9): pass"],
    ["hf_finetune.py", "--model", "hf_internal_testing/tiny", "./hf_checkpoints/x"],
    ["https://host/path@2", "user@host:/path", "a=b", "ß=ü", ""],
]


@pytest.mark.parametrize("case", MASKED)
def test_what_is_secret_is_masked(case: str) -> None:
    given, expected = MASKED[case]
    assert redacted_command(given) == tuple(expected)


@pytest.mark.parametrize("words", KEPT)
def test_what_is_not_secret_is_kept(words: list[str]) -> None:
    assert redacted_command(words) == tuple(words)


def test_the_text_of_an_error() -> None:
    text = "401 for https://u:pw@hub/x with token=abc; see hf_abcdefgh1234abcdefgh"
    assert redacted(text) == "401 for https://***@hub/x with token=***; see ***"
    assert redacted("CUDA out of memory. Tried to allocate 2.00 GiB") == (
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert redacted(redacted(text)) == redacted(text)
    for kept in ("multi-token prediction failed", "next-token loss is nan"):
        assert redacted(kept) == kept
