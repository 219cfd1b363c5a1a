"""How each change that is offered is made in the source of a loop of benchmarks/blocks/loops.

    edited(source, "gpt", "micro-batches:4") ──► the source with the change

Some changes are made in the same way in every loop; others stand in EDITS, as what is in the source
and what takes its place. PARTS is the number in the name of the change.
"""

from __future__ import annotations

import re

_CHUNKED = """

def in_chunks(head, hidden, targets):
    def part(h, y):
        return torch.nn.functional.cross_entropy(head(h), y, reduction="sum")

    parts = zip(hidden.chunk(PARTS), targets.chunk(PARTS))
    found = [torch.utils.checkpoint.checkpoint(part, *one, use_reentrant=False) for one in parts]
    return sum(found) / int((targets >= 0).sum())
"""
_LINEAR = (
    "torch.nn.functional.linear_cross_entropy("
    "hidden, HEAD.weight, wanted, options=torch.nn.LinearCrossEntropyOptions())"
)
_CAUSAL = """\
        out = model(**batch)
        out.loss.backward()
"""
_CAUSAL_HIDDEN = """\
        base = model.transformer(input_ids=ids)
        hidden = base.last_hidden_state.flatten(0, 1)
        wanted = torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], -100)), 1).flatten()
        out = types.SimpleNamespace(loss={loss})
        out.loss.backward()
"""
_SEQ2SEQ = """\
        outputs = model(input_ids=source, decoder_input_ids=target)
        logits = outputs.logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())
"""
_SEQ2SEQ_HIDDEN = """\
        encoded = model.encoder(input_ids=source)
        outputs = model.decoder(input_ids=target, encoder_hidden_states=encoded[0])
        hidden = outputs.last_hidden_state * model.model_dim**-0.5
        hidden = hidden[:, :-1].flatten(0, 1)
        wanted = target[:, 1:].flatten()
        loss = {loss}
"""
_GPT = """\
        logits = self.head(self.norm(h))
        loss = functional.cross_entropy(logits.view(-1, WORDS), y.view(-1))
        return logits, loss
"""
_GPT_HIDDEN = """\
        hidden, wanted = self.norm(h).flatten(0, 1), y.view(-1)
        return None, {loss}
"""

#: By loop and the beginning of a change's name.
EDITS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "gpt": {
        "micro-batches": [
            (
                """\
        logits, loss = model(x, y)  # noqa: RUF059
        optimizer.zero_grad()
        loss.backward()
""",
                """\
        optimizer.zero_grad()
        for part, words in zip(x.chunk(PARTS), y.chunk(PARTS)):
            logits, loss = model(part, words)
            (loss / PARTS).backward()
""",
            )
        ],
        "chunks": [
            (_GPT, _GPT_HIDDEN.format(loss="in_chunks(self.head, hidden, wanted)")),
        ],
        "linear_cross_entropy": [
            (_GPT, _GPT_HIDDEN.format(loss=_LINEAR.replace("HEAD", "self.head"))),
        ],
    },
    "causal_lm": {
        "micro-batches": [
            (
                """\
        batch = {"input_ids": ids, "labels": ids}
        out = model(**batch)
        out.loss.backward()
""",
                """\
        for part in ids.chunk(PARTS):
            batch = {"input_ids": part, "labels": part}
            out = model(**batch)
            (out.loss / PARTS).backward()
""",
            )
        ],
        "no-cache": [("model(**batch)", "model(**batch, use_cache=False)")],
        "chunks": [
            (_CAUSAL, _CAUSAL_HIDDEN.format(loss="in_chunks(model.lm_head, hidden, wanted)")),
        ],
        "linear_cross_entropy": [
            (
                _CAUSAL,
                _CAUSAL_HIDDEN.format(loss=_LINEAR.replace("HEAD", "model.lm_head")),
            ),
        ],
    },
    "encoder": {
        "micro-batches": [
            (
                """\
        outputs = model(input_ids=ids, labels=labels, output_hidden_states=True)
        outputs.loss.backward()
""",
                """\
        for part, wanted in zip(ids.chunk(PARTS), labels.chunk(PARTS)):
            outputs = model(input_ids=part, labels=wanted, output_hidden_states=True)
            (outputs.loss / PARTS).backward()
""",
            )
        ],
    },
    "seq2seq": {
        "micro-batches": [
            (
                f"""{_SEQ2SEQ}\
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
""",
                """\
        optimizer.zero_grad()
        for part, words in zip(source.chunk(PARTS), target.chunk(PARTS)):
            outputs = model(input_ids=part, decoder_input_ids=words)
            logits = outputs.logits
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())
            (loss / PARTS).backward()
""",
            )
        ],
        "no-cache": [("decoder_input_ids=target)", "decoder_input_ids=target, use_cache=False)")],
        "chunks": [
            (_SEQ2SEQ, _SEQ2SEQ_HIDDEN.format(loss="in_chunks(model.lm_head, hidden, wanted)")),
        ],
        "linear_cross_entropy": [
            (
                _SEQ2SEQ,
                _SEQ2SEQ_HIDDEN.format(loss=_LINEAR.replace("HEAD", "model.lm_head")),
            ),
        ],
    },
    "grpo": {
        "micro-batches": [
            (
                "    with torch.no_grad():\n",
                "    for ids, advantages in zip(ids.chunk(PARTS), advantages.chunk(PARTS)):\n"
                "      with torch.no_grad():\n",
            ),
            ("        old = policy", "          old = policy"),
            ("        old_logp = ", "          old_logp = "),
            *(
                (f"    {line}", f"      {line}")
                for line in ("logits = ", "logp = ", "ratio = ", "clipped = ", "loss = -", "loss.b")
            ),
        ],
        "chunks": [
            (
                """\
        old = policy(ids[:, :-1]).log_softmax(-1)
        old_logp = old.gather(-1, ids[:, 1:, None]).squeeze(-1)
    logits = policy(ids[:, :-1])
    logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
""",
                """\
        old_logp = chosen(policy, ids)
    logp = chosen(policy, ids)
""",
            ),
            (
                "def update(",
                """\
def chosen(policy, ids):
    def part(h, y):
        return policy.head(h).log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)

    hidden = policy.blocks(policy.tokens(ids[:, :-1])).flatten(0, 1)
    parts = zip(hidden.chunk(PARTS), ids[:, 1:].flatten().chunk(PARTS))
    found = [torch.utils.checkpoint.checkpoint(part, *one, use_reentrant=False) for one in parts]
    return torch.cat(found).view_as(ids[:, 1:])


def update(""",
            ),
        ],
    },
    "ppo": {
        "micro-batches": [
            (
                """\
        out = agent(rollout["states"])
""",
                """\
        optimizer.zero_grad()
        whole = rollout
        for number in range(PARTS):
          rollout = {name: one.chunk(PARTS)[number] for name, one in whole.items()}
          out = agent(rollout["states"])
""",
            ),
            (
                """\
        ratio = (logp - rollout["logp"]).exp()
        gain = torch.min(
            ratio * rollout["advantages"], ratio.clamp(0.8, 1.2) * rollout["advantages"]
        )
""",
                """\
          ratio = (logp - rollout["logp"]).exp()
          gain = torch.min(
              ratio * rollout["advantages"], ratio.clamp(0.8, 1.2) * rollout["advantages"]
          )
""",
            ),
            *(
                (f"        {line}", f"          {line}")
                for line in ("chosen = ", "logp = chosen", "entropy = ", "error = ", "loss = ")
            ),
            (
                """\
        optimizer.zero_grad()
        loss.backward()
""",
                """\
          (loss / PARTS).backward()
        rollout = whole
""",
            ),
        ],
    },
    "conv": {
        "micro-batches": [
            (
                """\
        logits, features = model(images)  # noqa: RUF059
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
""",
                """\
        optimizer.zero_grad()
        for part, wanted in zip(images.chunk(PARTS), wanted.chunk(PARTS)):
            logits, features = model(part)
            loss = functional.cross_entropy(logits, wanted)
            (loss / PARTS).backward()
""",
            )
        ],
    },
    "unet": {
        "micro-batches": [
            (
                """\
        predicted = model(noisy, t)
        loss = functional.mse_loss(predicted, noise)
        loss.backward()  # type: ignore[no-untyped-call]
""",
                """\
        for part, own, wanted in zip(noisy.chunk(PARTS), t.chunk(PARTS), noise.chunk(PARTS)):
            predicted = model(part, own)
            loss = functional.mse_loss(predicted, wanted)
            (loss / PARTS).backward()
""",
            )
        ],
    },
    "graph": {
        "micro-batches": [
            (
                """\
        out = model(x.flatten(0, 1), joined.transpose(0, 1).flatten(1))
        loss = (out["energy"] / NODES - 1.0).square()
        optimizer.zero_grad()
        loss.backward()
""",
                """\
        optimizer.zero_grad()
        whole = joined.transpose(0, 1).flatten(1)
        for number, part in enumerate(x.chunk(PARTS)):
            own = whole.chunk(PARTS, 1)[number] - number * part.shape[0] * NODES
            out = model(part.flatten(0, 1), own)
            loss = (out["energy"] / NODES - 1.0).square()
            (loss / PARTS).backward()
""",
            )
        ],
    },
    "lstm": {
        "micro-batches": [
            (
                """\
        logits, state = model(x[:, :-1], state)
        state = (state[0].detach(), state[1].detach())
        loss = functional.cross_entropy(logits.transpose(1, 2), x[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
""",
                """\
        states = list(zip(*(one.chunk(PARTS, 1) for one in state))) if state else [None] * PARTS
        kept = []
        for part, own in zip(x.chunk(PARTS), states):
            logits, own = model(part[:, :-1], own)
            kept.append((own[0].detach(), own[1].detach()))
            loss = functional.cross_entropy(logits.transpose(1, 2), part[:, 1:])
            (loss / PARTS).backward()
        state = tuple(torch.cat(one, 1) for one in zip(*kept))
""",
            )
        ],
    },
    "moe": {
        "micro-batches": [
            (
                """\
        made, routed = model(x)
        balance = sum(one.softmax(-1).mean(0).square().sum() for one in routed)
        error = (made - wanted).square()
        loss = functional.relu(error).mean() + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
""",
                """\
        optimizer.zero_grad()
        for part, own in zip(x.chunk(PARTS), wanted.chunk(PARTS)):
            made, routed = model(part)
            balance = sum(one.softmax(-1).mean(0).square().sum() for one in routed)
            error = (made - own).square()
            loss = functional.relu(error).mean() + 0.01 * balance
            (loss / PARTS).backward()
""",
            )
        ],
    },
    "autoencoder": {
        "micro-batches": [
            (
                """\
        made = model(rows)
        loss = functional.mse_loss(made, rows)
        loss.backward()  # type: ignore[no-untyped-call]
""",
                """\
        for part in rows.chunk(PARTS):
            made = model(part)
            loss = functional.mse_loss(made, part)
            (loss / PARTS).backward()
""",
            )
        ],
    },
}
#: By loop, the beginnings of the first and the last statement of the forward pass and loss; first
#: those of a pass without gradients, where there is one.
FORWARD = {
    "gpt": [("logits, loss = model(", "logits, loss = model(")],
    "causal_lm": [("out = model(", "out = model(")],
    "encoder": [("outputs = model(", "outputs = model(")],
    "seq2seq": [("outputs = model(", "loss = ")],
    "grpo": [("old = policy(", "old_logp = "), ("logits = policy(", "loss = ")],
    "ppo": [("old = agent(", "logp = "), ("out = agent(", "loss = ")],
    "conv": [("logits, features = model(", "loss = ")],
    "unet": [("predicted = model(", "loss = ")],
    "graph": [("out = model(", "loss = ")],
    "lstm": [("logits, state = model(", "loss = ")],
    "moe": [("made, routed = model(", "loss = ")],
    "autoencoder": [("made = model(", "loss = ")],
}
#: the variable of a loop that has the model, where it is not `model`
MODELS = {"grpo": "policy", "ppo": "agent"}


def in_autocast(source: str, first: str, last: str) -> str:
    """The source with the lines from one statement to another one under autocast."""
    lines = source.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.lstrip().startswith(first))
    end = next(i for i in range(begin, len(lines)) if lines[i].lstrip().startswith(last))
    indent = lines[begin][: -len(lines[begin].lstrip())]
    while lines[end + 1].startswith((f"{indent} ", f"{indent})")):  # the rest of that statement
        end += 1
    inner = [f"{indent}with torch.autocast('cpu', torch.bfloat16):"]
    inner += [f"    {line}" for line in lines[begin : end + 1]]
    return "\n".join([*lines[:begin], *inner, *lines[end + 1 :], ""])


def edited(source: str, loop: str, change: str) -> str:
    """The source of a loop with a change, by the name of the change."""
    kind, _, value = change.partition(":")
    model = MODELS.get(loop, "model")
    head = "import functools\nimport types\nimport torch.utils.checkpoint\n"
    if kind == "checkpoint":
        blocks = f"{model}.{value}" if value else model
        text = source.replace(
            "    optimizer = ",
            f"""\
    for layer in {blocks}:
        layer.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False
        )
    optimizer = """,
            1,
        )
        for call in ("model(**batch", "decoder_input_ids=target"):  # a cache would keep more
            text = text.replace(call, f"{call}, use_cache=False")
    elif kind == "zero_grad":
        text = re.sub(r"\n *optimizer\.zero_grad\(.*?\)", "", source)
        text = re.sub(r"( *)optimizer\.step\(\)", r"\g<0>\n\1optimizer.zero_grad()", text)
    elif kind == "fused":
        text = source.replace("model.parameters()", "model.parameters(), fused=True")
    elif kind == "autocast":
        text = source
        for first, last in FORWARD[loop]:
            text = in_autocast(text, first, last)
    else:
        text = source
        for before, after in EDITS[loop][kind]:
            assert before in text, (loop, change, before)
            text = text.replace(before, after)
        if "in_chunks(" in text:
            text += _CHUNKED
    return head + text.replace("PARTS", value)
