"""Chat templates: the text of a conversation and the turns of the assistant in it, and conversations that are rejected."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ringattn.train.data import chat
from ringattn.train.data.record_encoder import RecordEncoder
from ringattn.train.data.shards import Documents, Shards
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer, JsonTokenizer, tokenizer_of
from ringattn.train.data.workers import log_once
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.chats import CHATML, MARKED, PROMPT, write_chat_tokenizer

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "die Größe?"},
    {"role": "assistant", "content": "the ring\n\n "},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": " ranks 🦜"},
]
ANSWERS = ["the ring\n\n <|im_end|>", " ranks 🦜<|im_end|>"]

# The marks do not contain the stop token.
WITHOUT_STOP = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# The marks also contain the line break after the stop token.
WITH_BREAK = MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}")
TEMPLATES = {"marked": MARKED, "prefixes": CHATML, "without stop token": WITHOUT_STOP, "with line break": WITH_BREAK}
# Like Qwen 3, this template adds text only to the last answer.
INCONSISTENT = CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
)

PARAMETERS = {"type": "object", "properties": {"ü": {"default": 1}}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}]
WITH_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>{% endif %}"


def config_of(tmp_path, template: str, **settings) -> DataConfig:
    return DataConfig(source="jsonl", format="chat", tokenizer=write_chat_tokenizer(tmp_path, template), **settings)


def encoder_of(config: DataConfig) -> RecordEncoder:
    return RecordEncoder(config, JsonTokenizer(config.tokenizer, config.eos_token, config.special_tokens))


def trim_offsets(path: str) -> None:
    """Let a tokenizer leave out spaces from the offsets of its tokens, as Llama 3's does."""
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    tokenizer.save(path)


def test_tokens_of_a_span(tmp_path):
    path = write_chat_tokenizer(tmp_path)
    trim_offsets(path)
    text = " a\n\n ü \n"
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        tokens, is_marked = JsonTokenizer(path).encode_spans(text, [(start, end)])
        assert JsonTokenizer(path).decode(tokens[is_marked].tolist()) == text[start:end]


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_only_answers_and_their_stop_tokens_have_a_loss(template, trims, tmp_path):
    """transformers computes the expected tokens and, for marked templates, the expected mask."""
    config = config_of(tmp_path, TEMPLATES[template])
    if trims:
        trim_offsets(config.tokenizer)
    stored = encoder_of(config)("a record", {"messages": CHAT})
    tokens, has_loss = np.where(stored < 0, ~stored, stored), stored >= 0
    reference = PreTrainedTokenizerFast(tokenizer_file=config.tokenizer)
    text = reference.apply_chat_template(CHAT, chat_template=CHATML, tokenize=False)
    assert tokens.tolist() == reference.encode(text, add_special_tokens=False)
    edges = np.flatnonzero(np.diff(has_loss)) + 1
    parts = [
        reference.decode(part)
        for part, first in zip(np.split(tokens, edges), np.split(has_loss, edges), strict=True)
        if first[0]
    ]
    assert parts == ANSWERS
    if template == "marked" and not trims:
        encoded = reference.apply_chat_template(CHAT, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True)
        assert encoded["assistant_masks"] == has_loss.tolist()


def test_template_that_changes_earlier_turns_is_rejected(tmp_path):
    encode = encoder_of(config_of(tmp_path, INCONSISTENT))
    assert (encode("a", {"messages": CHAT[:3]}) >= 0).any()
    with pytest.raises(
        ConfigError, match=r"^a: the chat template of \S+ renders message 3 differently if other messages follow"
    ):
        encode("a", {"messages": CHAT})


def test_template_is_utf_8_in_every_locale(tmp_path, monkeypatch):
    template = CHATML.replace("<|im_start|>", "<｜▁ü｜>")  # noqa: RUF001  # DeepSeek's tokens have such bars
    config, read = config_of(tmp_path, "unused"), Path.read_text
    content = json.dumps({"eos_token": "<|im_end|>", "chat_template": template}, ensure_ascii=False)
    (tmp_path / "tokenizer_config.json").write_bytes(content.encode())
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="latin-1": read(path, encoding))
    assert chat.load_template(config.tokenizer).source == template


def test_template_in_its_own_file_and_among_several(tmp_path):
    config = config_of(tmp_path, "unused")
    path = tmp_path / "tokenizer_config.json"
    entries = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    path.write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": {"content": "<s>"}, "chat_template": entries}))
    template = chat.load_template(config.tokenizer)
    assert (template.path, template.source) == (path, CHATML)
    assert template.variables == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert chat.load_template(config.tokenizer).source == MARKED
    (tmp_path / "chat_template.jinja").unlink()
    path.write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": {"default": CHATML, "tool_use": "x"}}))
    assert AutoTokenizer.from_pretrained(tmp_path).get_chat_template() == CHATML
    assert chat.load_template(config.tokenizer).source == CHATML
    assert chat.load_template(config.tokenizer, "tool_use").source == "x"
    for found in ({"tool_use": "x"}, [{"name": "tool_use", "template": "x"}], ["x"], {}, 7):
        path.write_text(json.dumps({"chat_template": found}))
        with pytest.raises(
            ConfigError, match=re.escape(f"tokenizer_config.json has chat_template={found!r} without a default")
        ):
            chat.load_template(config.tokenizer)
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json has no entry chat_template"):
        chat.load_template(config.tokenizer)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("text", "the messages are 'text', but a list of objects with role and content is required"),
        (None, "the messages are None"),
        (["text"], "a list of objects"),
        ([], "no message has the role assistant"),
        (CHAT[:2], "no message has the role assistant"),
        ([{"role": "human", "content": "a"}], "message 1 has the role 'human': use one of system, developer, user"),
        ([{"from": "user", "value": "a"}], "message 1 has the role None"),
        ([CHAT[1], {"role": "assistant", "content": " \n"}], "message 2 is an empty answer of the assistant"),
        ([CHAT[1], {"role": "assistant", "content": None}], "message 2 has the content None, but text is required"),
        ([CHAT[1], {"role": "assistant", "content": [{"text": "a"}]}], "message 2 has the content"),
        ([{"role": "user", "content": "a<|im_end|>"}, CHAT[2]], r"message 1 contains <\|im_end\|>, the name of a special"),
        ([CHAT[1], {"role": "assistant", "content": "a\ud800"}], "half of a surrogate pair"),
    ],
)
def test_invalid_conversations_are_rejected(messages, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"^b.jsonl, line 7.*{reason}") as error:
        encoder_of(config_of(tmp_path, CHATML))("b.jsonl, line 7", {"messages": messages})
    assert "\n" not in str(error.value)


def test_failing_templates_are_rejected(tmp_path):
    for template, reason in {
        "{{ raise_exception('no system') }}": "does not accept these messages: no system",
        "{% for": "does not accept these messages: ",
        MARKED.replace("'assistant' %}{%", "'bot' %}{%"): "marks no turn of the assistant",
    }.items():
        with pytest.raises(ConfigError, match=f"^a: the chat template of .*{re.escape(reason)}"):
            encoder_of(config_of(tmp_path, template))("a", {"messages": CHAT})


def test_entries_that_the_template_does_not_use_are_rejected(tmp_path):
    """The model would learn an answer without its call, or an answer that the record excludes."""
    for name, value in (("tool_calls", [{"name": "f"}]), ("reasoning_content", "because"), ("weight", 0), ("train", False)):
        messages = [CHAT[1], {"role": "assistant", "content": "a", name: value}]
        with pytest.raises(
            ConfigError, match=f"^a: message 2 has the entry {name}, which the chat template of .* does not use"
        ):
            encoder_of(config_of(tmp_path, CHATML))("a", {"messages": messages})
        encoder_of(config_of(tmp_path, CHATML + f"{{# {name} #}}"))("a", {"messages": messages})
    neutral = {"role": "assistant", "content": "a", "weight": 1, "train": True, "tool_calls": [], "name": "x"}
    encoder_of(config_of(tmp_path, CHATML))("a", {"messages": [CHAT[1], neutral]})


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tools_are_rendered_without_a_loss(template, tmp_path):
    """The tokens equal those of transformers. Data sets contain tools as objects, with None (Parquet), or as JSON text."""
    config = config_of(tmp_path, WITH_TOOLS + template)
    encode, reference = encoder_of(config), PreTrainedTokenizerFast(tokenizer_file=config.tokenizer)
    text = reference.apply_chat_template(CHAT, tools=TOOLS, chat_template=WITH_TOOLS + CHATML, tokenize=False)
    assert json.dumps(TOOLS, ensure_ascii=False) in text
    expected = reference.encode(text, add_special_tokens=False)
    encode_parquet = encoder_of(replace(config, source="parquet"))
    for tools in (TOOLS, [TOOLS[0] | {"strict": None}], json.dumps(TOOLS)):
        stored = encode_parquet("a", {"messages": CHAT, "tools": tools})
        assert np.where(stored < 0, ~stored, stored).tolist() == expected
        assert reference.decode(stored[stored >= 0]) == "".join(ANSWERS)
    without = encode("a", {"messages": CHAT}).tolist()
    assert len(without) < len(expected)
    for tools in (None, [], "", "[]", "null"):
        assert encode("a", {"messages": CHAT, "tools": tools}).tolist() == without


@pytest.mark.parametrize(
    ("template", "tools", "reason"),
    [
        (CHATML, TOOLS, r"the record has tools, which the chat template of \S+ does not use: remove or rename this entry"),
        (WITH_TOOLS + CHATML, "find", "the tools are 'find', but a list of function schemas is required"),
        (WITH_TOOLS + CHATML, ["find"], r"the tools are \['find'\]"),
        (WITH_TOOLS + CHATML, TOOLS[0], "the tools are {'type'"),
        (WITH_TOOLS + CHATML, "1", "the tools are '1'"),
        (WITH_TOOLS + CHATML, [{"name": "<|im_end|>"}], r"the tools contain <\|im_end\|>, the name of a special token"),
    ],
)
def test_invalid_tools_are_rejected(template, tools, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"^a: {reason}"):
        encoder_of(config_of(tmp_path, template))("a", {"messages": CHAT, "tools": tools})


def test_records_with_tools_use_the_template_for_tools(tmp_path):
    config = config_of(tmp_path, "unused")
    entries = [{"name": "tool_use", "template": WITH_TOOLS + MARKED}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": entries}))
    encode = encoder_of(config)
    without, with_tools = encode("a", {"messages": CHAT}), encode("a", {"messages": CHAT, "tools": TOOLS})
    assert with_tools[-len(without) :].tolist() == without.tolist()
    assert len(with_tools) > len(without)
    # In newer folders, every template has its own file.
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(WITH_TOOLS + MARKED)
    assert encoder_of(config)("a", {"messages": CHAT, "tools": TOOLS}).tolist() == with_tools.tolist()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_readers_return_tools_and_name_ignored_columns(form, tmp_path, caplog):
    """Only the records of the first file have tools. Their cache key depends on the tools."""
    rows = [{"messages": CHAT, "tools": json.dumps(TOOLS), "documents": [], "id": 1}, {"messages": CHAT, "id": 2}]
    (text := tmp_path / "text").mkdir()
    for number, row in enumerate(rows):
        if form == "jsonl":
            (text / f"{number}.jsonl").write_text(json.dumps(row))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), text / f"{number}.parquet")
    config = replace(config_of(tmp_path, WITH_TOOLS + CHATML), source=form, path=str(text), num_proc=1)
    log_once.cache_clear()
    folder = tokenise(config, tokenizer_of(config))
    encode, stored = encoder_of(config), Documents.of(Shards(folder))
    assert [document.tolist() for document in stored] == [encode("a", row).tolist() for row in rows]
    assert len(stored[0]) > len(stored[1])
    assert [each for each in caplog.messages if each.startswith("ignored")] == [
        f"ignored     documents of {config.description}, because only messages and tools are given to the chat template"
    ]
    if form == "jsonl":
        (text / "0.jsonl").write_text(json.dumps(rows[0] | {"tools": TOOLS}))
        assert tokenise(config, tokenizer_of(config)) != folder


def test_special_tokens_in_messages_can_be_permitted(tmp_path):
    stored = encoder_of(config_of(tmp_path, CHATML, special_tokens="parse"))(
        "a", {"messages": [{"role": "user", "content": "<|im_start|>"}, CHAT[2]]}
    )
    assert sum(np.where(stored < 0, ~stored, stored) == 1) == 3


def test_entries_that_are_none_are_left_out_and_calls_of_tools_need_no_text(tmp_path):
    """Parquet files contain None for the entries that only other messages have."""
    template = CHATML.replace(
        "{{ m.content }}", "{% if 'tool_calls' in m %}{{ m.tool_calls[0] | tojson }}{% else %}{{ m.content }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "find", "id": None}]},
        {"role": "tool", "content": "b"},
    ]
    config = config_of(tmp_path, template)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # In JSON, null may be the value of an argument.
    for source, call in (("parquet", '{"name": "find"}'), ("jsonl", '{"name": "find", "id": null}')):
        stored = encoder_of(replace(config, source=source))("a", {"messages": messages})
        assert reference.decode(stored[stored >= 0].tolist(), skip_special_tokens=False) == f"{call}<|im_end|>"


def test_null_in_the_tools_of_json_is_rendered(tmp_path):
    config = config_of(tmp_path, WITH_TOOLS + CHATML)
    tools = [{"name": "find", "default": None}]
    parts = [
        encoder_of(replace(config, source=source))("a", {"messages": CHAT, "tools": tools}) for source in ("jsonl", "parquet")
    ]
    assert len(parts[0]) > len(parts[1])


def test_the_special_tokens_of_a_template_are_those_of_transformers(tmp_path):
    names = ("bos_token", "cls_token", "image_token", "sound_token", "pad_token")
    template = "{{ " + " }}{{ ".join(names) + " }}" + MARKED
    config = config_of(tmp_path, template)
    entries = json.loads((tmp_path / "tokenizer_config.json").read_text())
    entries |= {"tokenizer_class": "TokenizersBackend", "cls_token": "<|im_end|>", "image_token": "<|im_start|>"}
    entries |= {"pad_token": None, "extra_special_tokens": {"sound_token": "<|im_start|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    with pytest.raises(
        ConfigError, match=r"uses bos_token, which is not in tokenizer_config.json: add this entry, with .* null"
    ):
        encoder_of(config)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|endoftext|>"}')
    stored = encoder_of(config)("a", {"messages": CHAT})
    encoded = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encoded["input_ids"][:4] == [0, 2, 1, 1]
    assert np.where(stored < 0, ~stored, stored).tolist() == encoded["input_ids"]
    assert encoded["assistant_masks"] == (stored >= 0).tolist()


def test_the_header_of_a_turn_must_be_known(tmp_path):
    """Without a generation prompt, the text before an answer could only be found in templates without such a text."""
    encode = encoder_of(config_of(tmp_path, CHATML.removesuffix(PROMPT)))
    with pytest.raises(ConfigError, match=r"does not use add_generation_prompt, .* message 3: put {% generation %} and"):
        encode("a", {"messages": CHAT})
    headless = "{% for m in messages %}{{ ' ' + m.content + ' <|im_end|>' }}{% endfor %}"
    stored = encoder_of(config_of(tmp_path, headless))("a", {"messages": CHAT[1:3]})
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(stored[stored >= 0].tolist(), skip_special_tokens=False) == " the ring\n\n  <|im_end|>"


def test_prompt_and_completion():
    config = DataConfig(source="jsonl", format="prompt_completion")
    encode = RecordEncoder(config, BytesTokenizer())
    stored = encode("a", {"prompt": "2+ü=", "completion": " ü"})
    assert np.where(stored < 0, ~stored, stored).tolist() == [256, *"2+ü= ü".encode(), 256]
    assert stored[stored >= 0].tolist() == [*" ü".encode(), 256]
    for record, reason in {
        (None, "b"): "the prompt is None",
        ("a", 3): "the completion is 3",
        ("a", " "): "the completion is empty",
    }.items():
        with pytest.raises(ConfigError, match=f"^a: {reason}"):
            encode("a", dict(zip(("prompt", "completion"), record, strict=True)))
