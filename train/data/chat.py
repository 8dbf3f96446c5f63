"""Render conversations with the chat template of a tokenizer, and find the turns of the assistant in the text.

Some templates mark turns of the assistant with {% generation %}. For other templates, this module renders the conversation with
and without each turn.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringattn.train.data.tokenizer import JsonTokenizer, name_of, read_tokenizer_config
from ringattn.train.settings.config import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")

# The special tokens that a template can use if `tokenizer_config.json` defines them. The default differs between the tokenizer
# classes of transformers.
VARIABLES = ("bos_token", "eos_token", "pad_token", "unk_token")

# Entries that a chat template must use if a message of the assistant contains them
CONTENTS, FLAGS = ("tool_calls", "reasoning_content", "thinking"), ("weight", "train", "training")

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None  # JSON schemas of functions


@dataclass(frozen=True)
class ChatTemplate:
    """Renders messages as text with a Jinja template."""

    path: Path  # the file that contains the template
    source: str  # the text of the template
    variables: dict[str, str]  # maps variables, such as bos_token, to special tokens

    def render(self, messages: Messages, **options: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text. With `return_assistant_tokens_mask=True`, also return the spans that the template
        marks.

        Raises:
            ConfigError: the package transformers is missing, or the template does not accept the messages.
        """
        try:
            from transformers.utils.chat_template_utils import render_jinja_template as render
        except ImportError as error:
            raise ConfigError("data.format=chat requires the package transformers: pip install 'transformers>=5'") from error
        try:
            values: dict[str, Any] = options | self.variables
            rendered: Any = render([messages], chat_template=self.source, **values)
        except Exception as error:  # A template is code and may raise any error.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(f"the chat template of {self.path} does not accept these messages: {reason:.200}") from None
        (text,), spans = rendered
        return text, list(spans[0]) if spans else []

    def find_turns(
        self, messages: Messages, special_names: re.Pattern[str], tools: Tools = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the span of characters of each assistant turn.

        A turn includes its stop token. Raise ConfigError if the template rejects the messages, or if the turns cannot be found.
        """
        for number, message in enumerate(messages, 1):
            found = [name for name in CONTENTS if message.get(name)] + [name for name in FLAGS if message.get(name, 1) != 1]
            unused = [name for name in found if not self.uses(name)]
            if unused and message["role"] == "assistant":
                raise ConfigError(
                    f"message {number} has the entry {unused[0]}, which the chat template of {self.path} does not use: remove "
                    "the entry or the message, or use the entry in the template"
                )
        if tools and not self.uses("tools"):
            raise ConfigError(
                f"the record has tools, which the chat template of {self.path} does not use: remove or rename this entry, or "
                "use it in the template"
            )
        is_marked = re.search(r"\{%-?\s*generation\s*-?%\}", self.source) is not None
        if is_marked:
            text, spans = self.render(messages, tools=tools, return_assistant_tokens_mask=True)
        else:
            text, _ = self.render(messages, tools=tools)
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            spans = [self._find_turn(messages, index, text, tools) for index in turns]
        if not spans:
            raise ConfigError(f"the chat template of {self.path} marks no turn of the assistant in these messages: correct it")
        return text, [(start, _end_of_turn(text, start, end, special_names, is_marked)) for start, end in spans]

    def uses(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self.source) is not None

    def _find_turn(self, messages: Messages, index: int, text: str, tools: Tools) -> tuple[int, int]:
        before, _ = self.render(messages[:index], tools=tools, add_generation_prompt=True)
        after, _ = self.render(messages[: index + 1], tools=tools)
        if not (after.startswith(before) and text.startswith(after) and len(before) < len(after)):
            raise ConfigError(
                f"the chat template of {self.path} renders message {index + 1} differently if other messages follow, so it is "
                "unknown where this turn begins and ends: put {% generation %} and {% endgeneration %} around such turns in it"
            )
        content = (messages[index].get("content") or "").strip()
        if not self.uses("add_generation_prompt") and not after[len(before) :].lstrip().startswith(content):
            raise ConfigError(
                f"the chat template of {self.path} does not use add_generation_prompt, so it is unknown which text precedes "
                f"the answer in message {index + 1}: put {{% generation %}} and {{% endgeneration %}} around answers in it"
            )
        return len(before), len(after)


def _end_of_turn(text: str, start: int, end: int, special_names: re.Pattern[str], is_marked: bool) -> int:
    """Return the position after the stop token of a turn, or `end` if the turn has no stop token.

    The stop token is the last special token in the turn. A template with {% generation %} blocks may put the stop token after
    the block.
    """
    last = max((name.end() for name in special_names.finditer(text, start, end)), default=None)
    if last is not None and not text[last:end].strip():
        return last
    following = special_names.match(text, end) if is_marked else None
    return following.end() if following else end


def load_template(tokenizer: str, name: str = "default") -> ChatTemplate:
    """Return the chat template in the folder of a `tokenizer.json`.

    If the folder has several templates, return the template with the given name, or else the default.

    Raises:
        ConfigError: there is no template, or a file cannot be read.
    """
    if tokenizer == "bytes":
        raise ConfigError("data.format=chat requires a chat template, but data.tokenizer=bytes has none: leave data.format out")
    folder = Path(tokenizer).expanduser().parent
    config = read_tokenizer_config(folder)
    path, source = folder / "tokenizer_config.json", config.get("chat_template")
    files = folder / "additional_chat_templates" / f"{name}.jinja", folder / "chat_template.jinja"
    if file := next((file for file in files if file.is_file()), None):
        path, source = file, file.read_text("utf-8")
    elif isinstance(source, (list, dict)):  # several named templates
        entries = [each for each in source if isinstance(each, dict)]
        named = source if isinstance(source, dict) else {each.get("name"): each.get("template") for each in entries}
        source = named.get(name, named.get("default"))
    if not isinstance(source, str):
        found = config.get("chat_template")
        entry = "no entry chat_template" if found is None else f"chat_template={found!r:.80} without a default"
        raise ConfigError(
            f"data.format=chat requires a chat template, but {folder} has no chat_template.jinja, and its "
            f"tokenizer_config.json has {entry}: add one of them"
        )
    tokens = config | (extra if isinstance(extra := config.get("extra_special_tokens"), dict) else {})
    variables = {key: name_of(token) for key, token in tokens.items() if key.endswith("_token")}
    template = ChatTemplate(path, source, {key: token for key, token in variables.items() if isinstance(token, str)})
    if missing := [key for key in VARIABLES if key not in variables and template.uses(key)]:
        raise ConfigError(
            f"the chat template of {path} uses {missing[0]}, which is not in tokenizer_config.json: add this entry, with the "
            "value null if there is no such token"
        )
    return template


def check_messages(messages: Any, tokenizer: JsonTokenizer, parses: bool) -> Messages:
    """Return the messages of a record, without entries that are None.

    Args:
        messages: the record's value in the messages column.
        tokenizer: its special tokens must not occur in a message.
        parses: whether `data.special_tokens=parse` permits special tokens.

    Raises:
        ConfigError: the messages are not a conversation with an answer of the assistant.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"the messages are {messages!r:.60}, but a list of objects with role and content is required")
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConfigError(f"message {number} has the role {role!r:.60}: use one of {', '.join(ROLES)}")
        calls = role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise ConfigError(f"message {number} has the content {content!r:.60}, but text is required")
        if role == "assistant" and not calls and not (content or "").strip():
            raise ConfigError(f"message {number} is an empty answer of the assistant: remove it")
        _check_special_names(f"message {number} contains", message, tokenizer, parses)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("no message has the role assistant, so there is nothing to learn: remove the record")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def check_tools(tools: Any, tokenizer: JsonTokenizer, parses: bool) -> Tools:
    """Return the tools of a record, or None. The value `tools` may be JSON text, as in many Parquet files.

    The other arguments are those of `check_messages`. Raise ConfigError if the value is not a list of objects.
    """
    try:
        found = json.loads(tools) if isinstance(tools, str) and tools else tools
    except (ValueError, RecursionError):
        found = tools
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ConfigError(f"the tools are {tools!r:.60}, but a list of function schemas is required: correct or rename them")
    _check_special_names("the tools contain", found, tokenizer, parses)
    return found


def _check_special_names(what: str, value: Any, tokenizer: JsonTokenizer, parses: bool) -> None:
    found = tokenizer.special_names.search(json.dumps(value, ensure_ascii=False, default=str))
    if found and not parses:
        raise ConfigError(
            f"{what} {found[0]}, the name of a special token: remove it, or set data.special_tokens=parse to encode it as this "
            "token"
        )


def without_none(value: Any) -> Any:
    """Remove all entries with the value None, in all nested objects. Parquet files contain None for missing entries."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value
