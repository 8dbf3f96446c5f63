"""Turn conversations, or prompts with completions, into tokens with a loss mask.

Only the answers of the assistant (or the completion) and their stop tokens have labels.
"""

import inspect
from typing import Any

import numpy as np

from ringattn.train.data import chat
from ringattn.train.data.sources import check_size, check_surrogates
from ringattn.train.data.tokenizer import JsonTokenizer, Tokenizer
from ringattn.train.settings.config import ConfigError, DataConfig


class RecordEncoder:
    """Turns records into tokens. Raises ConfigError if the tokenizer has no chat template."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self._config, self._tokenizer, self._templates = config, tokenizer, list[chat.ChatTemplate]()
        if config.format == "chat":
            # Text from a chat template contains special tokens by name, so the tokenizer must recognise them.
            self._tokenizer = JsonTokenizer(config.tokenizer, config.eos_token, special_tokens="parse")
            self._templates = [chat.load_template(config.tokenizer, name) for name in ("default", "tool_use")]

    @property
    def identity(self) -> list[object]:
        templates = [(template.source, template.variables) for template in self._templates]
        return [self._config.format, templates, inspect.getsource(type(self)), inspect.getsource(chat)]

    def __call__(self, where: object, record: dict[str, Any]) -> np.ndarray:
        """Return the tokens of a record, int32 (N,). If a token t has no loss, the array contains -1 - t.

        Raises:
            ConfigError: the record is invalid. The message contains `where`.
        """
        try:
            text, spans = self._conversation(record) if self._templates else self._completion(record)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        check_surrogates(where, text)
        check_size(where, len(text.encode()), self._config.max_document_mb)
        tokens, has_loss = self._tokenizer.encode_spans(text, spans)
        if not self._templates:
            tokens = np.concatenate([[self._tokenizer.bos], tokens, [self._tokenizer.eos]]).astype(np.int32)
            has_loss = np.concatenate([[False], has_loss, [True]])
        if not has_loss[1:].any():
            raise ConfigError(f"{where}: no token has a loss: remove the record")
        return np.where(has_loss, tokens, ~tokens)

    def _conversation(self, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        assert isinstance(self._tokenizer, JsonTokenizer)
        if self._config.source != "jsonl":  # In JSON, null may be a value, such as an argument of a tool.
            record = chat.without_none(record)
        parses = self._config.special_tokens == "parse"
        messages = chat.check_messages(record.get(self._config.messages_column), self._tokenizer, parses)
        tools = chat.check_tools(record.get("tools"), self._tokenizer, parses)
        return self._templates[tools is not None].find_turns(messages, self._tokenizer.special_names, tools)

    def _completion(self, record: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        prompt, completion = record["prompt"], record["completion"]
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str):
                raise ConfigError(f"the {name} is {value!r:.60}, but text is required")
        if not completion.strip():
            raise ConfigError("the completion is empty, so there is nothing to learn: remove the record")
        return prompt + completion, [(len(prompt), len(prompt) + len(completion))]
