"""Every accepted model folder gives the same float64 logits as in transformers, and is exported again unchanged.

The tests vary the type of the model with its window, the scaling of its rotary positions, the matrix of its output head and the
number of rows of its embedding. Every folder also has the files of a chat model.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ringattn.train.checkpoint import huggingface
from ringattn.train.commands import export
from ringattn.train.model.gpt import GPT
from tests.covering import every_value
from tests.train.hub_models import (
    CHAT_FILES,
    LLAMA3,
    LLAMA3_SCALING,
    NULL,
    YARN,
    change_folder,
    import_folder,
    logits,
    read_files,
    read_tensors,
    settings_of,
    transformers_logits,
    write_chat_folder,
)

# cos and sin of the rotary positions are fp32 in both implementations, so logits of up to 2.5 differ by up to 7e-7. A wrong
# setting changes a logit by more than 1e-4, see `test_a_wrong_setting_exceeds_the_tolerance`.
TOLERANCE = 1e-5
TOKENS = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))

WINDOW = {"sliding_window": 7}
SLIDING, FULL = ({"layer_types": [f"{kind}_attention"] * 2} for kind in ("sliding", "full"))
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
KINDS = {
    "Llama": {},
    "Llama with an unused window": WINDOW,
    "Mistral": {"model_type": "mistral"} | WINDOW,
    "Mistral with the default window": {"model_type": "mistral", "num_key_value_heads": 2},
    "Mistral without a window": {"model_type": "mistral", "sliding_window": NULL},
    "Ministral": {"model_type": "mistral"} | WINDOW | SLIDING,
    "Ministral without a window": {"model_type": "mistral"} | WINDOW | FULL,
    "Ministral with a window in some layers": {"model_type": "mistral"} | WINDOW | MIXED,
    "Qwen 2": {"model_type": "qwen2", "use_sliding_window": False, "max_window_layers": 1} | WINDOW,
    "Qwen 2 with a window": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0} | WINDOW,
    "Qwen 2 with a listed window": {"model_type": "qwen2", "use_sliding_window": True} | WINDOW | SLIDING,
    "Qwen 2 with a window in no layer": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2} | WINDOW,
    "Qwen 2 with a window in the last layer": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    | WINDOW,
    "Qwen 3": {"model_type": "qwen3"},
    "Qwen 3 with a window": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0} | WINDOW,
}
OLDER = {"rope_parameters": None, "rope_theta": 50.0}
# In these settings of yarn, null means the default value. The default factor is max_position_embeddings / 400.
NULLS = dict.fromkeys(("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"))
# The scaling of rotary positions as the model cards of Qwen 2.5 recommend it.
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}
WITHOUT_LENGTH = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
ROPES = {
    "default": {},
    "no settings": {"rope_parameters": None},
    "older names": {"rope_parameters": None, "rope_theta": 3e4, "rope_scaling": NULL},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3 with older names": OLDER | {"rope_scaling": LLAMA3_SCALING},
    "yarn": {"rope_parameters": YARN},
    "yarn with null values": {"rope_parameters": YARN | NULLS, "max_position_embeddings": 1600},
    "yarn with null values and older names": OLDER | {"rope_scaling": QWEN_YARN | NULLS, "max_position_embeddings": 900},
    "yarn with older names": OLDER | {"rope_scaling": QWEN_YARN},
    "yarn with the length of the model": {"rope_parameters": WITHOUT_LENGTH, "max_position_embeddings": 600},
    "yarn without rounding": {"rope_parameters": YARN | {"truncate": False}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50.0}},
    "yarn with another length": {"rope_parameters": YARN, "original_max_position_embeddings": 900},
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# For each output head: whether config.json declares tied embeddings, and the name of a matrix that the weights do not contain.
HEADS = {
    "tied": (True, HEAD),
    "tied and equal": (True, ""),
    "tied and stored as the head": (True, EMBEDDING),
    "tied and different": (True, None),
    "untied": (False, None),
    "untied and missing": (False, HEAD),
}


def write_model(folder: Path, kind: str = "Llama", scaling: str = "default", head: str = "untied", rows: int = 259) -> Path:
    write_chat_folder(folder, vocab_size=rows, **KINDS[kind], **ROPES[scaling])
    declared, missing = HEADS[head]
    tensors = {missing: None} if missing else {}
    if missing == "":
        tensors = {HEAD: read_tensors(folder)[EMBEDDING]}
    return change_folder(folder, tensors, tie_word_embeddings=declared)


def our_logits(folder: Path, **changes: object) -> torch.Tensor:
    settings = replace(settings_of(folder), **changes)
    model = GPT(settings, 257).double()
    huggingface.load(folder, model)
    return logits(model, TOKENS)[:, : settings.vocab_size]


@every_value(kind=KINDS, scaling=ROPES, head=HEADS, rows=[259, 300, 320, 384])
def test_a_folder_has_the_logits_of_transformers_and_is_exported_unchanged(kind, scaling, head, rows, tmp_path):
    folder, exports = write_model(tmp_path / "hf", kind, scaling, head, rows), [tmp_path / "first", tmp_path / "second"]
    found, files = our_logits(folder), read_files(folder, ".safetensors")
    for source, out in zip((folder, exports[0]), exports, strict=True):
        export.export(import_folder(source, tmp_path / f"{out.name}-run"), out, torch.bfloat16)
    # The weights decide whether the head is tied, and the export declares what they decide.
    expected = {name: files[name] for name in ("config.json", "tokenizer.json", *CHAT_FILES)}
    is_tied = head not in ("untied", "tied and different")
    exported = read_files(exports[0], ".safetensors")
    if HEADS[head][0] != is_tied:
        config = json.loads(expected.pop("config.json")) | {"tie_word_embeddings": is_tied}
        assert json.loads(exported.pop("config.json")) == config
    assert exported == expected
    # If the export is imported and exported again, its weights stay identical, too.
    assert read_files(exports[0]) == read_files(exports[1])
    # transformers would draw a random head for an untied model without a head.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied or HEADS[head][0]}))
    for each in (folder, exports[0]):
        torch.testing.assert_close(found, transformers_logits(each, TOKENS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "scaling", "setting", "value"),
    [
        ("Llama", "default", "rope_theta", 510.0),
        ("Llama", "llama3", "rope_factor", 4.1),
        ("Llama", "llama3", "rope_trained_len", 42),
        ("Llama", "llama3", "rope_scaling", "yarn"),
        ("Llama", "llama3", "rope_factor", None),
        ("Llama", "yarn", "rope_factor", 4.1),
        ("Llama", "yarn", "rope_trained_len", 200),
        ("Llama", "default", "norm_eps", 1e-5),
        ("Llama", "default", "window", 39),
        ("Mistral", "default", "window", 8),
        ("Mistral", "default", "window", None),
    ],
)
def test_a_wrong_setting_exceeds_the_tolerance(kind, scaling, setting, value, tmp_path):
    folder = write_model(tmp_path / "hf", kind, scaling)
    difference = our_logits(folder, **{setting: value}) - transformers_logits(folder, TOKENS)
    assert difference.abs().max() > 10 * TOLERANCE


def test_transformers_reads_the_chat_files_of_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, out = write_model(tmp_path / "hf"), tmp_path / "out"
    export.export(import_folder(folder, tmp_path / "run"), out, torch.bfloat16)
    messages = [{"role": "user", "content": text} for text in "ab"]
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.eos_token_id, generation.pad_token_id, generation.temperature) == ([1, 0, 7], 2, 0.6)
    for each in (folder, out):
        tokenizer = transformers.AutoTokenizer.from_pretrained(each)
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "éaéb"
        assert tokenizer.pad_token == "!"
