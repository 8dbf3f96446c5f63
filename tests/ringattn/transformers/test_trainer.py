"""RingTrainer has the losses of Trainer in one process, step by step."""

import logging
import multiprocessing
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankPool, run_ranks
from tests.ringattn.transformers.small_models import (
    Stream,
    all_processes,
    chat_tokenizer,
    losses_of,
    new_model,
    one_process,
    packed_rows,
    padded_rows,
    random_tokens,
    training_arguments,
)

pytest.importorskip("transformers")

# An ignored document or window changes the losses by more than 1e-3.
TOLERANCE = 1e-5
WINDOWS = dict(sliding_window=7, layer_types=["sliding_attention", "full_attention"])


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False))


Case = tuple[Callable[[], torch.nn.Module], list[dict], dict]
CASES: dict[str, Case] = {
    "packed": (lambda: new_model("ministral", **WINDOWS), packed_rows(9), dict(gradient_accumulation_steps=2)),
    "padded on the left": (lambda: new_model(attention="sdpa"), padded_rows(9, "left"), dict(per_device_train_batch_size=3)),
    "padded on the right": (lambda: new_model("llama"), padded_rows(9, "right"), dict(gradient_accumulation_steps=2)),
    "checkpointing": (new_model, packed_rows(9), dict(activation_checkpointing=True)),
    "lora": (lambda: with_lora(new_model()), packed_rows(9), dict(gradient_accumulation_steps=3)),
    "experts": (
        lambda: new_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        packed_rows(9),
        {},
    ),
}


def train(cls: type, case: Case, folder: Path, steps: int, resume: bool | str = False, **settings: object) -> tuple:
    """Return the losses, the norms of the gradients, the evaluation loss, the predictions and the parameters."""
    make_model, rows, more = case
    args = training_arguments(folder, max_steps=steps, **more | settings)
    trainer = cls(model=make_model(), args=args, train_dataset=rows, eval_dataset=rows[:5])
    trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    found = trainer.predict(rows[:3])
    is_token = np.stack([row.get("attention_mask", torch.ones_like(row["input_ids"])).numpy() for row in rows[:3]])[..., None]
    predictions = found.predictions * is_token  # predictions of padding have no meaning
    parameters = [parameter.detach() for parameter in trainer.model.parameters()]
    return losses_of(trainer), norms, [trainer.evaluate()["eval_loss"], found.metrics["test_loss"]], predictions, parameters


def prepare_rank() -> None:
    all_processes()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def check_training(name: str, folder: Path, steps: int, resume_at: int | None = None) -> None:
    """Compare RingTrainer on all ranks with Trainer in one process, on every rank."""
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    with one_process():
        expected = train(Trainer, CASES[name], folder / f"one{dist.get_rank()}", steps)
    if resume_at:
        train(RingTrainer, CASES[name], folder / "ring", steps, save_strategy="steps", save_steps=resume_at)
        checkpoint = str(folder / "ring" / f"checkpoint-{resume_at}")
        found = train(RingTrainer, CASES[name], folder / "resumed", steps, resume=checkpoint)
    else:
        found = train(RingTrainer, CASES[name], folder / "ring", steps)
    assert len(found[0]) == steps
    for i, (some, others) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(some, others, strict=True):
            # Adam amplifies rounding in the parameters, which are the last results.
            atol = 1e-3 if i == len(found) - 1 else 10 * TOLERANCE
            torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y), rtol=TOLERANCE, atol=atol)


@pytest.mark.parametrize("name", ["packed", pytest.param("padded on the left", marks=pytest.mark.slow)])
def test_a_ring_has_the_losses_of_one_process(name: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_training, name, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_resumed_ring_has_the_losses_of_one_process(name: str, ranks: RankPool, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    # Trainer does not restore the optimizer of small models with experts exactly, not even in one process.
    ranks.run(check_training, name, tmp_path, 10, None if name == "experts" else 6)


def sft_trainer(base: type, folder: Path, **settings: object):
    """Return a trainer of TRL for packed chats, in which only the answers of the assistant have labels."""
    from datasets import Dataset
    from trl import SFTConfig

    chats = [
        [{"role": "user", "content": "x" * (i % 7 + 1)}, {"role": "assistant", "content": "abcdefgh"[: i % 8 + 1] * 3}]
        for i in range(40)
    ]
    rows = Dataset.from_list([{"messages": chat} for chat in chats])
    more = dict(packing=True, max_length=96, assistant_only_loss=True, bf16=False, activation_checkpointing=False)
    config = training_arguments(folder, SFTConfig, max_steps=10, gradient_accumulation_steps=2, **more | settings)
    sets = dict(train_dataset=rows, eval_dataset=rows.select(range(20)))
    return base(model=new_model(vocab_size=300), args=config, processing_class=chat_tokenizer(), **sets)


def check_sft(folder: Path) -> None:
    from trl import SFTTrainer

    from ringattn.transformers import RingMixin

    class RingSFTTrainer(RingMixin, SFTTrainer):
        pass

    prepare_rank()
    results = []
    for base in (SFTTrainer, RingSFTTrainer):
        with one_process() if base is SFTTrainer else nullcontext():
            settings = dict(save_strategy="steps", save_steps=6)
            trainer = sft_trainer(base, folder / f"{base.__name__}{dist.get_rank() if base is SFTTrainer else ''}", **settings)
            assert "position_ids" in next(iter(trainer.get_train_dataloader()))  # the rows are packed
            trainer.train()
            results.append((trainer.state.log_history, trainer.evaluate()))
    trainer = sft_trainer(RingSFTTrainer, folder / "resumed")
    trainer.train(resume_from_checkpoint=str(folder / "RingSFTTrainer" / "checkpoint-6"))
    (expected, expected_eval), (found, found_eval) = results
    for history in (found, trainer.state.log_history):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            values, others = ([entry[name] for entry in log if name in entry] for log in (history, expected))
            assert len(values) == 10 or (name, len(values)) == ("num_tokens", 11)
            if history is found or name != "num_tokens":
                np.testing.assert_allclose(values, others, rtol=1e-4, err_msg=name)
    for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
        assert found_eval[name] == pytest.approx(expected_eval[name], rel=1e-4)


@pytest.mark.slow
def test_the_trainer_of_trl_has_the_losses_of_one_process(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    ranks.run(check_sft, tmp_path)


def check_other_tokens(folder: Path) -> None:
    """Every rank has a data set of its own."""
    from ringattn.transformers import RingTrainer

    prepare_rank()
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in random_tokens(4, 20, seed=dist.get_rank())]
    trainer = RingTrainer(model=new_model(), args=training_arguments(folder), train_dataset=rows)
    with pytest.raises(ValueError, match="rank 1 of the group has another batch than rank 0"):
        trainer.train()


def test_other_tokens_on_a_rank_are_an_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_other_tokens, tmp_path)


def check_numbers(folder: Path) -> None:
    """Numbers that Trainer adds over the ranks count every token once, and evaluation weights every row once."""
    from ringattn.transformers import RingTrainer

    prepare_rank()
    settings = dict(include_num_input_tokens_seen=True, max_steps=2, gradient_accumulation_steps=2)
    rows = packed_rows(8)
    for ring_size in (None, 1):
        args = training_arguments(folder, **settings)
        trainer = RingTrainer(model=new_model(), args=args, train_dataset=rows, ring_size=ring_size)
        trainer.train()
        rings = 1 if ring_size is None else 2
        assert trainer.state.num_input_tokens_seen == rings * 2 * 2 * 2 * 63
        assert trainer.get_total_train_batch_size(args) == rings * 2 * 2
        # With two rings, the last batch of five rows is filled with rows that do not count.
        predictions = trainer.predict(rows[:5]).predictions
        batch = {name: value[None] for name, value in rows[0].items()}
        logits = trainer.prediction_step(trainer.model, batch, prediction_loss_only=False)[1]  # outside of a loop over a loader
        np.testing.assert_allclose(logits[0], predictions[0], rtol=1e-4, atol=1e-5)
        assert predictions.shape == (5, 63, 128)
        without_labels = [{name: row[name] for name in ("input_ids", "position_ids")} for row in rows[4:5]]
        for last in (rows[4:5], without_labels):
            np.testing.assert_allclose(predictions[[4]], trainer.predict(last).predictions, rtol=1e-4, atol=1e-5)


def test_rings_of_other_sizes_count_tokens_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_numbers, tmp_path)


def check_last_batch(folder: Path) -> None:
    """In the last batch of an evaluation, each row is counted once, even if rows have different numbers of labels."""
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    rows = padded_rows(5, "right")
    with one_process():
        trainer = Trainer(model=new_model(), args=training_arguments(folder))
        expected = [trainer.evaluate(rows)["eval_loss"], trainer.evaluate(Stream(rows))["eval_loss"]]
    sizes = (2, rows), (2, Stream(rows)), (1, rows)  # with ring_size=1, accelerate repeats a row
    for ring_size, data in sizes:
        args = training_arguments(folder, per_device_eval_batch_size=ring_size)
        trainer = RingTrainer(model=new_model(), args=args, ring_size=ring_size)
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected[isinstance(data, Stream)], rel=1e-6)


def test_the_last_batch_of_an_evaluation(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_last_batch, tmp_path)


def check_rows_without_length(folder: Path, num_workers: int) -> None:
    """Two rings fill the last batch of a stream with rows that do not count."""
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    multiprocessing.current_process()._config["daemon"] = False  # the ranks may start workers
    rows = padded_rows(7, "right")
    for count, size in ((7, 1),) if num_workers else ((1, 2), (3, 2), (5, 1), (7, 2)):
        with one_process():
            args = training_arguments(folder, per_device_eval_batch_size=2 * size, dataloader_num_workers=num_workers)
            expected = Trainer(model=new_model(), args=args).predict(Stream(rows[:count]))
        args = training_arguments(folder, per_device_eval_batch_size=size, dataloader_num_workers=num_workers)
        found = RingTrainer(model=new_model(), args=args, ring_size=1).predict(Stream(rows[:count]))
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6)
        is_token = torch.stack([row["attention_mask"] for row in rows[:count]]).sum(1).numpy()
        assert len(found.predictions) == count
        for some, others, length in zip(found.predictions, expected.predictions, is_token, strict=True):
            if not num_workers:  # workers change the order
                np.testing.assert_allclose(some[:length], others[:length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_without_a_length_on_two_rings(num_workers: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_rows_without_length, tmp_path, num_workers)


def check_joined_rows(folder: Path) -> None:
    """A collator joins the rows of a batch. Each batch counts once, whatever its size."""
    from transformers import DataCollatorWithFlattening, Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    rows = [{"input_ids": tokens.tolist(), "labels": tokens.tolist()} for tokens in random_tokens(5, 20)]
    results = []
    for size, base, more in ((4, Trainer, {}), (2, RingTrainer, dict(ring_size=1))):
        with one_process() if base is Trainer else nullcontext():
            args = training_arguments(folder, per_device_eval_batch_size=size, per_device_train_batch_size=size, max_steps=2)
            trainer = base(
                model=new_model(), args=args, data_collator=DataCollatorWithFlattening(), train_dataset=Stream(rows), **more
            )
            results.append(trainer.evaluate(Stream(rows))["eval_loss"])
            trainer.train()
            results.append(losses_of(trainer))
    assert results[2:] == [pytest.approx(values, rel=1e-5) for values in results[:2]]
    with pytest.raises(ValueError, match="the collator joins rows: use drop_last=True, or a multiple of 4"):
        trainer.evaluate(rows)


def test_rows_that_a_collator_joins(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_joined_rows, tmp_path)


def check_evaluation_before_training(folder: Path) -> None:
    """A second training also averages the gradients of all ranks."""
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    rows, results = packed_rows(7), []
    for base, size, options in ((Trainer, 4, {}), (RingTrainer, 4, {}), (RingTrainer, 2, dict(ring_size=1))):
        with one_process() if base is Trainer else nullcontext():
            args = training_arguments(folder, per_device_train_batch_size=size, max_steps=3)
            trainer = base(model=new_model(), args=args, train_dataset=rows, eval_dataset=rows[:4], **options)
            trainer.evaluate()
            trainer.train()
            trainer.predict(rows[:4])
            trainer.train()
            results.append((losses_of(trainer), [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]))
    for found in results[1:]:
        np.testing.assert_allclose(found, results[0], rtol=1e-4)


def test_evaluation_before_training(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(check_evaluation_before_training, tmp_path)


def check_fsdp(folder: Path) -> None:
    """accelerate uses FSDP2 only on GPUs. On a CPU, its state must be changed."""
    from accelerate.state import AcceleratorState, DistributedType
    from torch.distributed.fsdp import fully_shard
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    case = CASES["packed"]
    with one_process():
        expected = train(Trainer, case, folder / f"one{dist.get_rank()}", 8)
    create = AcceleratorState.__init__

    def create_with_fsdp(self: AcceleratorState, *args: object, fsdp_plugin: object = None, **options: object) -> None:
        create(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    with one_process():  # resets the state of accelerate
        pass
    spy = mock.patch("torch.distributed.fsdp.fully_shard", wraps=fully_shard)
    with mock.patch.object(AcceleratorState, "__init__", create_with_fsdp), spy as shard:
        found = train(RingTrainer, case, folder / "ring", 8, fsdp=True)
    assert shard.call_count >= 3  # two layers and the model
    for some, others in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_allclose(np.asarray(some), np.asarray(others), rtol=TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.slow
def test_parameters_that_fsdp_has_sharded(tmp_path: Path) -> None:
    run_ranks(check_fsdp, 2, tmp_path / "ranks", tmp_path / "run")


def check_two_rings(folder: Path) -> None:
    """Two rings of two ranks, with one row each, have the losses of one process with two rows."""
    from transformers import Trainer

    from ringattn.transformers import RingTrainer

    prepare_rank()
    rows, results = packed_rows(8), []
    for cls in (Trainer, RingTrainer):
        with one_process() if cls is Trainer else nullcontext():
            size, ring = (2, {}) if cls is Trainer else (1, {"ring_size": 2})
            args = training_arguments(
                folder / f"{cls.__name__}{dist.get_rank()}",
                gradient_accumulation_steps=2,
                per_device_train_batch_size=size,
                per_device_eval_batch_size=size,
            )
            trainer = cls(model=new_model(), args=args, train_dataset=rows, eval_dataset=rows[:6], **ring)
            trainer.train()
            results.append((losses_of(trainer), trainer.evaluate()["eval_loss"], trainer.predict(rows[:5]).predictions))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.slow
def test_two_rings_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(check_two_rings, 4, tmp_path / "ranks", tmp_path / "run")


UNSUPPORTED = {
    "label_smoothing_factor": dict(label_smoothing_factor=0.1),
    "neftune_noise_alpha": dict(neftune_noise_alpha=5.0),
    "average_tokens_across_devices=False": dict(average_tokens_across_devices=False),
    "train_sampling_strategy='batch_rebalance'": dict(train_sampling_strategy="batch_rebalance"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments_are_errors(name: str, tmp_path: Path) -> None:
    from ringattn.transformers import RingTrainer

    with pytest.raises(ValueError, match=f"does not support {name}"):
        RingTrainer(model=new_model(), args=training_arguments(tmp_path, **UNSUPPORTED[name]), train_dataset=packed_rows(2))
    with pytest.raises(ValueError, match="ring_size=2: it must divide the number of ranks, which is 1"):
        RingTrainer(model=new_model(), args=training_arguments(tmp_path), train_dataset=packed_rows(2), ring_size=2)


def test_other_trainers_of_trl_are_errors() -> None:
    """The batches of GRPOTrainer are lists, and those of DPOTrainer contain pairs of sequences. Importing TRL takes seconds."""
    from ringattn.transformers import RingTrainer

    base = type("DPOTrainer", (), {"__module__": "trl.trainer.dpo_trainer"})
    kind = type("RingDPOTrainer", (RingTrainer, base), {})
    with pytest.raises(ValueError, match="RingDPOTrainer is a DPOTrainer, which a ring does not support"):
        kind(model=new_model())


def test_a_loss_function_of_the_user_is_an_error(tmp_path: Path) -> None:
    """The loss function would receive the labels of one rank."""
    from ringattn.transformers import RingTrainer

    args = training_arguments(tmp_path)
    with pytest.raises(ValueError, match="does not support compute_loss_func"):
        RingTrainer(model=new_model(), args=args, train_dataset=packed_rows(2), compute_loss_func=lambda *_, **__: None)
