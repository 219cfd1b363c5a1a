"""memtools.use(trainer): the same training in parts that fit, in one line, and back again."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import trl
from transformers import GenerationMixin, LlamaForCausalLM, Trainer

import memtools
from tests.integrations.tinytrl import KINDS, logged, model, other_model, parameters, trainer
from tests.kit.oominject import Inject, out_of_memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # TRL's and transformers' own
    pytest.mark.slow,
]
# TRL means these over the chosen tokens of a batch.
_ABOUT = ("logits/", "mean_token_accuracy")


def trained(kind: str, folder: Any, is_used: bool, part: int = 3, **options: Any) -> Any:
    made = trainer(kind, folder, **options)
    adapter = memtools.use(made, micro_batch_size=part) if is_used else None
    made.train()
    return made, adapter


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_in_parts_is_the_training_in_whole_batches(kind, tmp_path):
    plain, _ = trained(kind, tmp_path, False)
    used, adapter = trained(kind, tmp_path, True)

    assert "had 3 rows" in str(adapter)
    torch.testing.assert_close(parameters(used), parameters(plain), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(logged(used), logged(plain), strict=True):
        same = {k: v for k, v in theirs.items() if not (kind == "DPO" and k.startswith(_ABOUT))}
        assert {k: ours[k] for k in same} == pytest.approx(same, rel=1e-4, abs=1e-5)
    wanted = {"train", "loss", "backward", "optimizer"}
    if kind in ("GRPO", "RLOO"):
        wanted |= {"generate", "reward"}
        assert "4 answers to each" in str(adapter)
    assert {phase.name for phase in adapter.monitor.phases()} >= wanted


@pytest.mark.parametrize("kind", ["without num_items_in_batch", "DPO"])
def test_an_update_of_several_batches_counts_each_token_once(kind, tmp_path):
    plain, _ = trained(kind, tmp_path, False)
    uneven = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    used, _ = trained(kind, tmp_path, True, 1, **uneven)
    torch.testing.assert_close(parameters(used), parameters(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_that_runs_out_of_memory_runs_again_and_counts_once(kind, where, tmp_path):
    plain, _ = trained(kind, tmp_path, False, gradient_accumulation_steps=2)
    made = trainer(kind, tmp_path, gradient_accumulation_steps=2)
    inject = Inject(**{where: {1}})

    def hook(module: Any, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            output.last_hidden_state = inject(output.last_hidden_state)

    made.model.model.register_forward_hook(hook)
    adapter = memtools.use(made, micro_batch_size=6)
    made.train()
    assert "1 part ran again with fewer rows" in str(adapter)
    torch.testing.assert_close(parameters(made), parameters(plain), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(logged(made), logged(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_remove_puts_everything_back(tmp_path):
    made = trainer("GRPO", tmp_path)
    callbacks = list(made.callback_handler.callbacks)
    made.compute_loss, made.training_step = made.compute_loss, made.training_step
    before = dict(vars(made))
    adapter = memtools.use(made)
    ours = {name for name in vars(made) if vars(made)[name] is not before.get(name)}
    assert {"compute_loss", "training_step", "_generate_single_turn"} <= ours
    made.train()
    adapter.remove()
    adapter.remove()
    assert {name: vars(made).get(name) for name in ours} == {
        name: before.get(name) for name in ours
    }
    assert made.callback_handler.callbacks == callbacks
    assert type(made).loss_is_scaled_for_ga is True
    assert "generate" not in vars(made.model)
    memtools.use(made).remove()


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().training_step(*args, **kwargs)


class LargestLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:  # fmt: skip
        logits = model(input_ids=inputs["input_ids"]).logits
        each = torch.nn.functional.cross_entropy(logits.mT, inputs["input_ids"], reduction="none")
        return each.max()


class EqualLosses(Trainer):
    """The mean over rows of losses that are all 1, but have gradients: as DPO's at first."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False,
                     num_items_in_batch: Any = None) -> Any:  # fmt: skip
        each = model(input_ids=inputs["input_ids"]).logits.logsumexp(-1).mean(1)
        return (each - each.detach()).exp().mean()


class GISTEmbedLoss:
    """Has the name of a loss of sentence_transformers."""


class Ranking(LargestLoss):
    loss = GISTEmbedLoss()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (OwnStep, "OwnStep has its own training_step()"),
        (Ranking, "GISTEmbedLoss compares the rows of a batch; CachedGISTEmbedLoss computes it"),
        (LargestLoss, "the loss of two of its rows is"),
        (EqualLosses, "the losses of its rows do not tell"),
    ],
)
def test_what_cannot_be_cut_is_left_and_trains_as_before(kind, why, tmp_path):
    def train(is_used: bool) -> Any:
        base = trainer("transformers", tmp_path, gradient_accumulation_steps=2)
        made = kind(base.model, base.args, train_dataset=base.train_dataset)
        adapter = memtools.use(made, micro_batch_size=3) if is_used else None
        made.train()
        return made, adapter

    (plain, _), (used, adapter) = train(False), train(True)
    assert f"Batches run whole: {why}" in str(adapter)
    assert parameters(used).equal(parameters(plain))


@pytest.mark.parametrize(
    ("has_metrics", "options", "is_told"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"batch_eval_metrics": True}, False),
        (True, {"prediction_loss_only": True}, False),
    ],
)
def test_an_evaluation_that_keeps_outputs_is_told(has_metrics, options, is_told, tmp_path):
    base = trainer("transformers", tmp_path, **options)
    metrics = (lambda found, compute_result=True: {}) if has_metrics else None
    plain = {"train_dataset": base.train_dataset, "compute_metrics": metrics}
    made = Trainer(base.model, base.args, **plain)
    assert ("Evaluation keeps the model's outputs" in str(memtools.use(made))) == is_told
    keeps = Trainer(base.model, base.args, **plain, preprocess_logits_for_metrics=lambda x, _: x[0])
    assert "Evaluation keeps" not in str(memtools.use(keeps))


class WeighsClasses(torch.nn.Module):
    """The mean of a cross entropy with weights, which is none over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any) -> Any:
        weight = torch.tensor([1.0, 5.0])
        return {
            "loss": torch.nn.functional.cross_entropy(self.inner(x), labels, weight=weight),
        }


@pytest.mark.parametrize("rare", [5, 13])
def test_weights_of_classes_are_found_at_the_first_row_of_a_rare_class(rare, tmp_path):
    torch.manual_seed(1)
    rows = [{"x": torch.randn(4), "labels": torch.tensor(int(row == rare))} for row in range(16)]
    arguments = trainer("transformers", tmp_path, train_sampling_strategy="sequential").args
    plain, used = (Trainer(WeighsClasses(), arguments, train_dataset=rows) for _ in range(2))
    adapter = memtools.use(used, micro_batch_size=3)
    plain.train()
    used.train()
    assert "Batches run whole: the loss of two of its rows is neither" in str(adapter)
    torch.testing.assert_close(parameters(used), parameters(plain), rtol=1e-5, atol=1e-6)


class CountsRows(torch.nn.Module):
    """A model that counts the rows that it has seen, in a new buffer and in a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.rows = torch.nn.Linear(4, 1), 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Any, labels: Any) -> Any:
        self.seen, self.rows = self.seen + len(x), self.rows + len(x)
        return {"loss": torch.nn.functional.mse_loss(self.inner(x)[:, 0], labels)}


def test_a_model_that_counts_rows_counts_those_of_the_training(tmp_path):
    rows = [{"x": torch.rand(4), "labels": torch.rand(())} for _ in range(48)]
    arguments = trainer("transformers", tmp_path).args
    net = CountsRows()
    adapter = memtools.use(made := Trainer(net, arguments, train_dataset=rows), micro_batch_size=3)
    made.train()
    assert "had 3 rows" in str(adapter)
    assert (int(net.seen), net.rows) == (32, 32)  # 4 updates of 8


@pytest.mark.parametrize("kind", ["transformers", "without num_items_in_batch", "DPO"])
def test_outside_of_train_a_step_is_the_trainers_own(kind, tmp_path):
    made = trainer(kind, tmp_path, gradient_accumulation_steps=2)
    batch = next(iter(made.get_train_dataloader()))

    def step() -> torch.Tensor:
        made.model.zero_grad()
        made.current_gradient_accumulation_steps = 2
        loss = made.training_step(made.model, dict(batch))
        return torch.cat([loss[None], *(p.grad.flatten() for p in made.model.parameters())])

    before = step()
    adapter = memtools.use(made, micro_batch_size=3)
    assert step().equal(before)
    made.train()
    after = step()
    adapter.remove()
    assert step().equal(after)


WHOLE = {
    "sorts the rows": ("DPO", {"loss_type": ["sigmoid", "aot"]}),
    "top_entropy_quantile": ("GRPO", {"top_entropy_quantile": 0.5}),
    "the entropy bonus": ("GRPO", {"entropy_coef": 0.1}),
}


@pytest.mark.parametrize("why", WHOLE)
def test_a_loss_of_all_rows_together_is_not_cut(why, tmp_path):
    kind, options = WHOLE[why]
    made, adapter = trained(kind, tmp_path, True, **options | {"max_steps": 1})
    assert why in str(adapter)
    plain, _ = trained(kind, tmp_path, False, **options | {"max_steps": 1})
    assert parameters(made).equal(parameters(plain))


def test_kto_runs_in_whole_batches(tmp_path):
    made = trainer("DPO", tmp_path)
    made.__class__ = type("KTOTrainer", (type(made),), {})
    assert "KTO compares each row with the KL divergence" in str(memtools.use(made))


def test_clip_ratios_of_sequences_are_means_over_rows(tmp_path):
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2}
    runs = [trained("RLOO", tmp_path, used, **options)[0] for used in (False, True)]
    plain, used = (
        [entry["clip_ratio/region_mean"] for entry in logged(made)[:-1]] for made in runs
    )
    assert max(plain) > 0
    assert used == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_a_second_training_with_model_init_undoes_parts_of_its_own_model(tmp_path):
    def train(is_used: bool) -> tuple[Any, Any]:
        base, made = trainer("transformers", tmp_path), []

        def model_init() -> Any:
            made.append(model(tmp_path))
            return made[-1]

        both = Trainer(model_init=model_init, args=base.args, train_dataset=base.train_dataset)
        adapter = memtools.use(both, micro_batch_size=4) if is_used else None
        both.train()
        inject = Inject(backward={2})

        def hook(module: Any, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                output.last_hidden_state = inject(output.last_hidden_state)

        def fails_once() -> Any:
            net = model_init()
            if is_used:
                net.model.register_forward_hook(hook)
            return net

        both.model_init = fails_once
        both.train()
        return both, adapter

    (plain, _), (used, adapter) = train(False), train(True)
    assert "1 part ran again with fewer rows" in str(adapter)
    torch.testing.assert_close(parameters(used), parameters(plain), rtol=1e-5, atol=1e-6)


def test_remove_works_after_a_training_that_was_interrupted(tmp_path):
    made = trainer("transformers", tmp_path, gradient_accumulation_steps=3)
    adapter = memtools.use(made)
    step, calls = made.training_step, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    made.training_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.train()
    adapter.remove()
    assert "compute_loss" not in vars(made)


def test_dropout_in_training_keeps_generation_as_it_is(tmp_path):
    made = trainer("GRPO", tmp_path, max_steps=1)
    made.model.config.attention_dropout = 0.1
    adapter = memtools.use(made)
    made.train()
    assert "Generation is the trainer's own: the model generates in training mode" in str(adapter)


@pytest.mark.parametrize("whose", ["of the model", "of transformers"])
def test_a_generate_that_the_program_has_replaced_gets_all_rows(whose, tmp_path, monkeypatch):
    made, plain, rows = trainer("GRPO", tmp_path, max_steps=1), GenerationMixin.generate, []

    def generate(net: Any, input_ids: Any, **options: Any) -> Any:
        rows.append(len(input_ids))
        return plain(net, input_ids, **options)

    if whose == "of the model":
        made.model.generate = types.MethodType(generate, made.model)
    else:
        monkeypatch.setattr(GenerationMixin, "generate", generate)
    before = made.model.generate
    adapter = memtools.use(made)
    made.train()
    assert rows == [8]
    assert "own: the program has replaced generate() of LlamaForCausalLM" in str(adapter)
    assert made.model.generate == before


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("bamba", "Equal prompts are computed and stored once: 4 answers to each."),
        ("mamba", "Equal prompts are computed once: 4 answers to each. The cache of each prompt is "
                  "copied for its answers, because a KVPool cannot hold it: it has layers of type "
                  "LinearAttentionLayer."),
    ],
)  # fmt: skip
def test_groups_of_models_with_other_caches_have_the_same_rewards(kind, says, tmp_path):
    made = []
    for is_used in (False, True):
        options = {"max_steps": 1, "generation_kwargs": {"use_cache": not is_used}}
        made.append(trainer("GRPO", tmp_path, net=other_model(tmp_path, kind), **options))
        adapter = memtools.use(made[-1]) if is_used else None
        made[-1].train()
    assert says in " ".join(str(adapter).split())
    for ours, theirs in zip(logged(made[1]), logged(made[0]), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "set_to", "said"),
    [
        ("GRPO", {"use_vllm": True}, "vLLM has its own cache"),
        ("GRPO", {"is_fsdp_enabled": True}, "own: each process has a part of the model."),
        ("SFT", {"get_cp_size": lambda: 2}, "2 processes run each batch together (cp_size)."),
    ],
)
def test_what_other_processes_have_is_left_alone_and_said(kind, set_to, said, tmp_path):
    made = trainer(kind, tmp_path)
    for name, value in set_to.items():
        setattr(made, name, value)
    adapter = memtools.use(made)
    assert said in str(adapter)
    adapter.remove()


def test_the_head_of_a_model_in_parts_is_left_alone(tmp_path):
    made = trainer("transformers", tmp_path)
    made.is_fsdp_enabled = True
    adapter = memtools.use(made, chunked_loss=True)
    assert "own: each process has a part of the head's weight." in str(adapter)
    adapter.remove()


def deepspeed(made: Any) -> dict[str, Any]:
    made.is_deepspeed_enabled = True
    return {}


BAD = {
    "already: call its remove": lambda made: memtools.use(made) and {},
    "pass limit= or monitor=": lambda made: {
        "limit": "1 GiB", "monitor": memtools.MemoryMonitor(),
    },
    "DeepSpeed runs the backward pass": deepspeed,
    "micro_batch_size": lambda made: {"micro_batch_size": 0},
    "limit": lambda made: {"limit": -1},
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_bad_input_changes_nothing(why, tmp_path):
    made = trainer("transformers", tmp_path)
    options = BAD[why](made)
    before = dict(vars(made))
    with pytest.raises(ValueError, match=why):
        memtools.use(made, **options)
    assert vars(made) == before


@pytest.mark.parametrize("other", [object(), types.SimpleNamespace(), trl.SFTTrainer])
def test_other_objects_are_refused(other):
    with pytest.raises(TypeError, match="knows transformers.Trainer and its subclasses, Lightning"):
        memtools.use(other)


def test_remove_in_the_middle_of_an_update_is_refused(tmp_path):
    made = trainer("transformers", tmp_path, gradient_accumulation_steps=2, max_steps=1)
    adapter = memtools.use(made)
    step, refused = made.training_step, []

    def removes(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        try:
            adapter.remove()
        except RuntimeError as error:
            refused.append(str(error))
        return result

    made.training_step = removes
    made.train()
    assert len(refused) == 1
    assert "in the middle of an update" in refused[0]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_log_probabilities_of_samples_are_computed_in_parts_that_fit(kind, tmp_path):
    """TRL computes them outside of compute_loss: those of the old policy, for example."""
    options = {"num_iterations": 2} if kind == "GRPO" else {}
    plain, _ = trained(kind, tmp_path, False, **options)
    made, sizes = trainer(kind, tmp_path, **options), []
    of_trl = made._get_per_token_logps_and_entropies

    def scored(model: Any, ids: Any, mask: Any, kept: int, size: int, *args: Any, **more: Any):
        if not torch.is_grad_enabled():
            sizes.append(size)
            if len(sizes) == 1:
                torch.rand(1)  # as dropout would have done by then
                raise out_of_memory()
        return of_trl(model, ids, mask, kept, size, *args, **more)

    made._get_per_token_logps_and_entropies = scored
    adapter = memtools.use(made, micro_batch_size=6)
    made.train()
    assert sizes[:2] == [6, 3]
    assert max(sizes[2:]) <= 3
    assert "Log-probabilities are computed for at most 3 rows at once" in str(adapter)
    torch.testing.assert_close(parameters(made), parameters(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "bf16": True}])
def test_a_loss_in_chunks_is_the_loss_from_logits(options, tmp_path):
    plain, _ = trained("transformers", tmp_path, False, **options)
    made = trainer("transformers", tmp_path, **options)
    shapes = set()
    made.model.lm_head.register_forward_hook(lambda _, args, out: shapes.add(tuple(out.shape)))
    adapter = memtools.use(made, micro_batch_size=3, chunked_loss=True)
    made.train()
    assert "without the logits of all tokens" in str(adapter)
    width = made.model.config.hidden_size
    assert {shape[-1] for shape in shapes if shape[0] > 2} == {width}, "no logits of a part"
    off = 2e-3 if options else 1e-6
    torch.testing.assert_close(parameters(made), parameters(plain), rtol=0, atol=off)
    for ours, theirs in zip(logged(made), logged(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2 if options else 1e-5, abs=1e-5)

    batch = {name: value[None] for name, value in made.train_dataset[0].items()}
    assert made.model.eval()(**batch).logits.shape[-1] == 128
    adapter.remove()
    assert made.model.train()(**batch).logits.shape[-1] == 128
    assert "forward" not in vars(made.model.lm_head)
    assert "_loss_function" not in vars(made.model)


class Capped(LlamaForCausalLM):
    """As a model that caps its logits."""

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None, **_: Any) -> Any:
        out = super().forward(input_ids, attention_mask)
        out.logits = 9 * torch.tanh(out.logits / 9)
        if labels is not None:
            out.loss = self.loss_function(out.logits, labels, 128)
        return out


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("transformers", {"label_smoothing_factor": 0.1}, "label smoothing and compute_loss_func"),
        ("SFT", {}, "SFTTrainer has its own compute_loss(): loss_type='chunked_nll'"),
        ("Capped", {}, "as Capped changes its logits or adds to its loss"),
    ],
)
def test_where_a_loss_has_no_chunks_it_stays_the_models_own(kind, options, why, tmp_path):
    made = []
    for is_used in (False, True):
        one = trainer(kind.replace("Capped", "transformers"), tmp_path, **options)
        if kind == "Capped":
            one.model.__class__ = Capped
        adapter = memtools.use(one, chunked_loss=True) if is_used else None
        one.train()
        made.append(one)
    assert why in str(adapter)
    assert "The loss is the model's own" in str(adapter)
    torch.testing.assert_close(parameters(made[1]), parameters(made[0]), rtol=1e-5, atol=1e-6)
