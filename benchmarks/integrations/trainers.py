"""memtools.use(trainer) beside the plain trainer: losses, memory and processor time.

    python -m benchmarks.integrations.trainers    # about 15 minutes; writes results/trainers.json

Every run is a process of its own, with the same seed and data. `--only` runs one part:

fit       Two updates of a batch of 32 rows by a small llama with a vocabulary of 8,192. `plain`
          and `use` have no limit. `60 %` has RLIMIT_DATA at what the process has before training,
          and 60 % of the resident memory by which the plain training grows. The rows of GRPO and
          RLOO are 4 prompts of 100 words, each answered 8 times with 24 tokens.
losses    50 updates of a batch of 8 rows by AdamW, with `use` in parts of 3 rows. AdamW divides by
          small numbers and so enlarges what rounding changes: `reversed` is the plain trainer with
          the rows of each batch in reverse order, which only adds in another order.
sampling  The sampling of GRPO alone, a prompt of 800 words answered 8 times.
steps     300 steps of Trainer that fit, three ways, ten steps of each in turns. What the training
          thread takes is compared; to that comes the share of a core that the sampler takes, whose
          samples come by the clock.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import Json, arguments, environment, table
from benchmarks.kit.limits import Limit, finish, number_limit

KINDS = ("Trainer", "Trainer, a mean", "SFT", "DPO", "GRPO", "RLOO", "Lightning")
SHARE = 0.6  # of what the plain training grows by
SAME = 1e-6  # Losses may differ by this share.
PART = 3  # rows, of the batches of `losses`
FIRST, TURN = 100, 10  # steps
ANSWERS = 16, 64  # tokens; the limits are for the first
SECONDS = 900
PROGRAM = (sys.executable, "-m", "benchmarks.integrations.trainers")


@dataclass(frozen=True)
class Size:
    """The size of a training. `words`, `prompts` and `answer` are those of GRPO and RLOO."""

    vocabulary: int = 8192
    longest: int = 120  # tokens
    rows: int = 32
    steps: int = 2
    words: int = 100
    prompts: int = 4
    answer: int = 24
    optimizer: str = "sgd"
    rate: float = 0.1


LARGE = Size()
LONG = Size(512, 60, 8, 50, 30, 1, 12, "adamw_torch", 1e-3)


def main() -> None:
    if sys.argv[1:2] == ["--steps"]:
        stepped(sys.argv[2])
        return
    options = arguments(__doc__).parse_args()
    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Limit]]]] = {
        "fit": (measure_fit, limits_of_fit),
        "losses": (measure_losses, limits_of_losses),
        "sampling": (measure_sampling, limits_of_sampling),
        "steps": (measure_steps, limits_of_steps),
    }
    names = [name for name in parts if name.startswith(options.only or "")]
    figures: Json = {name: parts[name][0]() for name in names}
    limits = [limit for name in names for limit in parts[name][1](figures[name])]
    finish("trainers", options, environment(options.threads), figures, limits)


# --- fit ---


def measure_fit() -> list[Json]:
    """The four runs of each trainer."""
    rows: list[Json] = []
    for kind in KINDS:
        plain = child(trained, kind, "plain")
        limit = int(SHARE * plain["grown"])
        rows.append({
            "kind": kind, "plain": plain, "use": child(trained, kind, "use"),
            "plain 60 %": child(trained, kind, "plain", limit),
            "use 60 %": child(trained, kind, "use", limit),
        })  # fmt: skip
    header = ("trainer", "grows MiB", "60 % plain", "with use", "off", "cpu s", "use", "60 %")
    lines = [
        (
            row["kind"],
            f"{row['plain']['grown'] / 2**20:,.0f}",
            row["plain 60 %"]["ended"],
            row["use 60 %"]["ended"],
            f"{worst([row]):.1e}",
            *(f"{row[name]['cpu']:.1f}" for name in ("plain", "use", "use 60 %")),
        )
        for row in rows
    ]
    print(table(header, lines))
    return rows


def limits_of_fit(rows: list[Json]) -> list[Limit]:
    ended = sum(row["use 60 %"]["ended"] != "finished" for row in rows)
    most = worst(rows)
    return [
        number_limit(f"trainings of {len(KINDS)} that do not finish at 60 %", 0, "", ended, ended),
        number_limit("losses and norms of gradients beside plain", SAME, "off", most, most),
    ]


# --- losses ---


def measure_losses() -> list[Json]:
    """The runs of 50 updates of each trainer."""
    ways = ("plain", "use", "reversed")
    rows: list[Json] = [
        {"kind": kind, **{way: child(trained, kind, way, 0, LONG) for way in ways}}
        for kind in KINDS
    ]
    lines = [
        [
            row["kind"],
            *(
                f"{off(row, way, what):.1e}"
                for what in ("loss", "grad_norm", "reward")
                for way in ("use", "reversed")
            ),
        ]
        for row in rows
    ]
    print(table(("trainer", "loss", "reversed", "norm", "reversed", "reward", "reversed"), lines))
    return rows


def limits_of_losses(rows: list[Json]) -> list[Limit]:
    losses, rewards = (max(off(row, "use", what) for row in rows) for what in ("loss", "reward"))
    return [
        number_limit(f"losses of {LONG.steps} updates beside plain", SAME, "off", losses, losses),
        number_limit("rewards of these beside plain", 0, "off", rewards, rewards),
    ]


def worst(rows: list[Json]) -> float:
    names, values = ("use", "use 60 %"), ("loss", "grad_norm")
    return max(off(row, name, what) for row in rows for name in names for what in values)


def off(row: Json, name: str, what: str) -> float:
    """The largest difference of a value from the plain one, of what is larger, that or 1; inf if a
    run did not finish."""
    ours, plain = row[name]["logged"][what], row["plain"]["logged"][what]
    if len(ours) != len(plain):
        return float("inf")
    pairs = zip(ours, plain, strict=True)
    return max((abs(a - b) / max(1.0, abs(b)) for a, b in pairs), default=0.0)


# --- sampling ---


def measure_sampling() -> list[Json]:
    """The sampling of GRPO, plain and with use, in turns."""
    found = [sampling_of(answer) for answer in ANSWERS]
    for one in found:
        print(
            f"GRPO samples 8 answers of {one['answer']} tokens to a prompt of 800 words: memory "
            f"{one['memory']:.2f} x of plain, processor time {one['cpu']:.2f} x (min; median "
            f"{one['cpu_median']:.2f}), same rewards: {one['same']}"
        )
    return found


def limits_of_sampling(found: list[Json]) -> list[Limit]:
    one = found[0]
    return [
        number_limit("memory of sampling beside plain", 0.4, "x", one["memory"], one["memory"]),
        number_limit(
            "processor time of sampling beside plain", 0.35, "x", one["cpu"], one["cpu_median"]
        ),
    ]


def sampling_of(answer: int) -> Json:
    runs: dict[str, list[Json]] = {"plain": [], "use": []}
    for _ in range(3):
        for way, found in runs.items():
            found.append(child(sampled, way, answer))
    plain, ours = runs["plain"], runs["use"]
    ratios = [a["cpu"] / b["cpu"] for a, b in zip(ours, plain, strict=True)]
    # Memory that malloc has idle hides a part of the growth, so the largest shows most of it.
    most, most_plain = (max(one["grown"] for one in made) for made in (ours, plain))
    return {
        "answer": answer,
        "runs": runs,
        "memory": most / most_plain,
        "cpu": min(ratios),
        "cpu_median": statistics.median(ratios),
        "same": all(a["rewards"] == plain[0]["rewards"] for a in ours),
    }


# --- steps ---


def measure_steps() -> Json:
    """The steps of a training whose batches fit, three ways in turns."""
    ways = ("plain", "use", "callback")
    children = {
        way: subprocess.Popen(
            [*PROGRAM, "--steps", way], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        for way in ways
    }  # fmt: skip
    times: dict[str, list[float]] = {way: [] for way in ways}
    shares = dict.fromkeys(ways, 0.0)
    while len(times["plain"]) < 1 + (STEPS.steps - FIRST) // TURN:
        for way, process in children.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            took, shares[way] = json.loads(process.stdout.readline())
            times[way].append(took)
    for process in children.values():
        process.communicate("\n", timeout=SECONDS)
    plain = times["plain"]
    figures: Json = {"times": times, "sampler": shares}
    figures["step_ms"] = 1e3 * statistics.median(plain[1:]) / TURN
    figures["first"] = times["use"][0] - plain[0]
    for way in ways[1:]:
        turns = [a / b for a, b in zip(times[way][1:], plain[1:], strict=True)]
        figures[way] = {
            "turns": turns,
            "median": statistics.median(turns) + shares[way],
            "all": sum(times[way][1:]) / sum(plain[1:]) + shares[way],
        }
    print(f"a plain step takes {figures['step_ms']:.0f} ms of the processor")
    print(f"the first {FIRST} steps take {figures['first']:.1f} s more with use")
    return figures


def limits_of_steps(found: Json) -> list[Limit]:
    return [
        number_limit(
            f"{words} after the first {FIRST}, {way} beside plain",
            most, "x", found[way][which], found[way][which],
        )
        for way, most in (("use", 1.02), ("callback", 1.01))
        for words, which in (("a step", "median"), ("all steps", "all"))
    ]  # fmt: skip


def child(run: Callable[..., Json], *words: object) -> Json:
    """What a function returns in a process of its own, in which the libraries are loaded."""
    import datasets  # noqa: F401
    import lightning  # noqa: F401
    import trl  # noqa: F401

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(run, words).get(SECONDS)


# --- in a process of its own ---


def trained(kind: str, way: str, limit: int = 0, size: Size = LARGE) -> Json:
    """Train in this process, and return its losses, growth and times."""
    prepared()
    with tempfile.TemporaryDirectory() as folder:
        logs: Callable[[], list[Json]]
        if kind == "Lightning":
            trainer, module, run, logs = of_lightning(size)
        else:
            trainer = module = made(kind, Path(folder), size)
            run, logs = trainer.train, lambda: trainer.state.log_history
        if way == "reversed":
            reverse(module, 2 if kind == "DPO" else 1)
        elif way == "use":
            import memtools

            memtools.use(trainer, micro_batch_size=PART if size is LONG else None)
        before = memory("VmRSS")
        if limit:
            most = memory("VmData") + limit
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        began, ended = time.process_time(), "finished"
        try:
            run()
        except RuntimeError as error:
            ended = "out of memory" if "allocate memory" in str(error) else str(error)
    found = logs()
    return {
        "logged": {
            name: [float(entry[name]) for entry in found if "loss" in entry and name in entry]
            for name in ("loss", "grad_norm", "reward")
        },
        "ended": ended,
        "grown": memory("VmHWM") - before,  # use() resets it in each phase
        "cpu": time.process_time() - began,
    }


def prepared() -> None:
    """Have torch take one thread, and libraries print nothing."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def reverse(module: Any, blocks: int) -> None:
    """Have the loss of a trainer or a module take the rows of each block in reverse order."""
    import torch

    name = "training_step" if hasattr(module, "configure_optimizers") else "compute_loss"
    plain = getattr(module, name)

    def reversed_rows(batch: Json) -> Json:
        rows = max(len(value) for value in batch.values() if is_of_rows(value))
        return {
            name: torch.cat([block.flip(0) for block in value.chunk(blocks)])
            if is_of_rows(value) and len(value) == rows
            else value
            for name, value in batch.items()
        }

    def is_of_rows(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0

    def compute(*args: Any, **kwargs: Any) -> Any:
        at = 0 if name == "training_step" else 1
        return plain(*args[:at], reversed_rows(args[at]), *args[at + 1 :], **kwargs)

    setattr(module, name, compute)


def sampled(way: str, answer: int) -> Json:
    """Sample as GRPO does in this process, and return what that costs after the first time. The
    loss is 0: what it would take is no part of this."""
    prepared()
    costs: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = made("GRPO", Path(folder), Size(words=800, prompts=1, answer=answer, steps=4))
        trainer.compute_loss = lambda model, *args, **kwargs: 0 * model.lm_head.weight.sum()
        if way == "use":
            import memtools

            memtools.use(trainer)
        sample = trainer._generate_single_turn

        def measured(*args: Any, **kwargs: Any) -> Any:
            ctypes.CDLL(None).malloc_trim(0)  # What is idle would hide the growth.
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew.
            before, began = memory("VmRSS"), time.process_time()
            made = sample(*args, **kwargs)
            costs.append((memory("VmHWM") - before, time.process_time() - began))
            return made

        trainer._generate_single_turn = measured
        trainer.train()
    later = costs[1:]
    return {
        "grown": max(grown for grown, _ in later),
        "cpu": sum(cpu for _, cpu in later) / len(later),
        "rewards": [x["reward"] for x in trainer.state.log_history if "reward" in x],
    }


STEPS = Size(rows=4, steps=300)


def stepped(way: str) -> None:
    """Train in this process, and print after each turn what it took of this thread, and the
    sampler's share of a core. A turn begins with a line on the standard input."""
    prepared()
    import transformers

    import memtools
    from memtools.integrations.transformers import MemoryCallback

    monitor: memtools.MemoryMonitor | None = None
    began, count = 0.0, 0

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            nonlocal began, count
            count += 1
            if count >= FIRST and (count - FIRST) % TURN == 0:
                share = 0.0 if monitor is None else monitor.overhead[1]
                print(json.dumps((time.thread_time() - began, share)), flush=True)
                sys.stdin.readline()
                began = time.thread_time()

    with tempfile.TemporaryDirectory() as folder:
        trainer = made("Trainer", Path(folder), STEPS)
        if way == "use":
            monitor = memtools.use(trainer).monitor
        elif way == "callback":
            monitor = MemoryCallback().add_to(trainer).monitor
        trainer.add_callback(Clock())
        sys.stdin.readline()
        began = time.thread_time()
        trainer.train()


def memory(name: str) -> int:
    """A value of /proc/self/status in bytes."""
    match = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return 1024 * int(match[1])


def made(kind: str, folder: Path, size: Size) -> Any:
    """A trainer with a model of its own."""
    from transformers import PrinterCallback

    trainer = trainer_of(kind, folder, size)
    trainer.remove_callback(PrinterCallback)
    return trainer


def trainer_of(kind: str, folder: Path, size: Size) -> Any:
    import datasets
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    datasets.disable_progress_bars()
    vocabulary = size.vocabulary // 4 if kind == "DPO" else size.vocabulary
    llama(vocabulary).save_pretrained(folder / "model")  # TRL reads a second one from there.
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    draw = random.Random(1)
    options = {
        "output_dir": str(folder / "out"), "max_steps": size.steps, "logging_steps": 1,
        "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 1,
        "optim": size.optimizer, "learning_rate": size.rate,
        "per_device_train_batch_size": size.rows,
    }  # fmt: skip
    if kind.startswith("Trainer"):
        rows = [row(draw, size) for _ in range(64)]
        net = model if kind == "Trainer" else mean_of(model)
        return Trainer(net, TrainingArguments(**options), train_dataset=rows)
    if kind in ("GRPO", "RLOO"):
        options |= {
            "num_generations": 8, "max_completion_length": size.answer,
            "per_device_train_batch_size": 8 * size.prompts,
        }  # fmt: skip
    return of_trl(kind, model, options, draw, vocabulary, size)


def of_lightning(size: Size) -> tuple[Any, Any, Callable[[], object], Callable[[], list[Json]]]:
    """A Trainer of Lightning, its module, how it trains, and what returns its losses and norms."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, default_collate

    net = llama(size.vocabulary)
    logged: list[Json] = []

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(**batch).loss
            self.log("loss", loss)
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
            logged.append({"grad_norm": float(torch.stack(norms).norm())})

        def on_train_batch_end(self, *args: Any) -> None:
            logged[-1]["loss"] = float(self.trainer.callback_metrics["loss"])

        def configure_optimizers(self) -> Any:
            kind = torch.optim.SGD if size.optimizer == "sgd" else torch.optim.AdamW
            return kind(self.parameters(), size.rate)

    draw = random.Random(1)
    rows: Any = [row(draw, size) for _ in range(4 * size.rows)]
    data: Any = DataLoader(rows, size.rows, collate_fn=default_collate)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, max_steps=size.steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    return trainer, module, functools.partial(trainer.fit, module, data), lambda: logged


def llama(vocabulary: int) -> Any:
    """A small model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def row(draw: random.Random, size: Size) -> dict[str, Any]:
    import torch

    ids = [draw.randrange(3, size.vocabulary) for _ in range(draw.randrange(30, size.longest))]
    left = size.longest - len(ids)
    return {
        "input_ids": torch.tensor(ids + [0] * left),
        "labels": torch.tensor(ids + [-100] * left),
        "attention_mask": torch.tensor([1] * len(ids) + [0] * left),
    }


def mean_of(model: Any) -> Any:
    """A model whose forward() takes no num_items_in_batch, so that its loss is a mean."""
    import torch

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
            return self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    return Mean()


def of_trl(
    kind: str, model: Any, options: Json, draw: random.Random, vocabulary: int, size: Size
) -> Any:
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: i for i, name in enumerate(("<pad>", "<eos>", "<unk>"))}
    words |= {f"w{i}": i + 3 for i in range(vocabulary - 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def text(least: int, most: int) -> str:
        count = draw.randrange(least, most)
        return " ".join(f"w{draw.randrange(vocabulary - 3)}" for _ in range(count))

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [sum(w[-1:] in "02468" for w in c.split()) / 10 for c in completions]

    answer = functools.partial(text, 30, size.longest - 20)
    more: Json = {}
    if kind == "SFT":
        rows, options["loss_type"] = [{"text": text(30, size.longest)} for _ in range(64)], "nll"
    elif kind == "DPO":
        rows = [
            {"prompt": text(20, 21), "chosen": f" {answer()}", "rejected": f" {answer()}"}
            for _ in range(64)
        ]
    else:
        rows = [{"prompt": text(size.words, size.words + 1)} for _ in range(64)]
        more["reward_funcs"] = reward
    options |= {"bf16": False, "gradient_checkpointing": False}
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
        **more,
    )


if __name__ == "__main__":
    main()
