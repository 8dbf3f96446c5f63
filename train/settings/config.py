"""Define the settings of a run as typed dataclasses, and check them before anything is built.

The YAML files in configs/ override the defaults, and the command line overrides both. The page docs/settings.md is generated
from the comments above the fields.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ringattn.choices import KINDS, ROUTES, SCHEDULES
from ringattn.kernels.choices import BACKENDS, MAX_HEAD_DIM


class ConfigError(ValueError):
    """A setting, a file or a combination of settings is invalid. Each message says how to solve the problem."""


def resolve_path(name: str, value: str) -> Path:
    """Return the value of the setting `name` as an absolute path, which need not exist.

    Raises:
        ConfigError: the path is too long for a file, or contains a loop of links.
    """
    try:
        path = Path(value).expanduser().resolve()
        path.exists()  # raises an error if the path is too long
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}={value:.60} is not a valid path: {f'{error}':.100}; check it") from None
    return path


def replace_invalid(text: str) -> str:
    """Return `text` with ? in place of characters that are not UTF-8."""
    return text.encode(errors="replace").decode()


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Frozen:
    """A base class for settings that never change. OmegaConf could not fill dataclasses with `frozen=True`."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise FrozenInstanceError(f"{name} of settings is frozen: create a copy with `with_settings`")
        super().__setattr__(name, value)


class Rope(NamedTuple):
    """Holds the parameters of a layer's rotary position embedding (`ringattn.train.model.rope`)."""

    dim: int  # the first dimensions of each head, which are rotated; 0: the layer has no rotary embedding
    theta: float
    factor: float | None = None
    trained_len: int | None = None
    scaling: str = "llama3"
    factors: tuple[float, ...] = ()  # the divisors of the frequencies in LongRoPE


class LayerAttention(NamedTuple):
    """The attention settings of a layer."""

    window: int | None
    rope: Rope


@dataclass
class ModelConfig(Frozen):
    """The architecture of the GPT."""

    # The number of rows of the embedding. None: the vocabulary size of the tokenizer. Published models may have additional
    # rows, which our loss and sampling ignore, unlike transformers.
    vocab_size: int | None = None
    # Transformer blocks.
    layers: int = 2
    # The width of the residual stream.
    dim: int = 128
    # Query heads.
    heads: int = 4
    # Key heads, which must divide `heads`. Grouped-query attention has fewer key heads than query heads.
    kv_heads: int = 2
    # The width of one head, even and at most 256. If None, the width is `dim / heads`.
    head_dim: int | None = None
    # The hidden width of the gated feed-forward network. If None, the width is 8/3 of `dim`, rounded up to a multiple of 64.
    ffn_dim: int | None = None
    # The number of experts per layer. Each expert has the hidden width `ffn_dim`. If None, a layer has one feed-forward network
    # for all tokens.
    experts: int | None = None
    # The number of experts that the router chooses for each token.
    experts_per_token: int = 2
    # Whether the weights of the chosen experts are scaled to sum to 1, or are probabilities among all experts.
    normalise_top_k: bool = True
    # Whether the router and the experts have biases, as in gpt-oss.
    expert_bias: bool = False
    # The factor of the load-balancing loss. The load-balancing loss is small if all experts process equally many tokens of a
    # micro-step, over all ranks. The recorded `loss` does not include the load-balancing loss.
    balance_loss: float = 0.001
    # The base of the rotary position embedding.
    rope_theta: float = 10_000.0
    # The base of the rotary position embedding in sliding layers. If set, `rope_factor` applies only to full layers. If None,
    # sliding layers have the same rotary embedding as full layers.
    local_rope_theta: float | None = None
    # The fraction of each head's dimensions that rotary embeddings rotate. The first dimensions are rotated.
    rotary_fraction: float = 1.0
    # The factor that divides low rotary frequencies, to extend a model to longer sequences. All values of `rope_scaling` except
    # "linear" also require `rope_trained_len`. If None, frequencies stay unchanged.
    rope_factor: float | None = None
    # The sequence length before the model was extended. Only valid together with `rope_factor`.
    rope_trained_len: int | None = None
    # The way in which `rope_factor` changes rotary frequencies: "linear" (divides all), "llama3" or "yarn" (also sharpens the
    # softmax of attention). "yarn-exact" is yarn without rounding, as in gpt-oss. "longrope" uses `rope_factors`.
    rope_scaling: str = "llama3"
    # Two concatenated lists of divisors for the rotary frequencies in LongRoPE (Phi-3). The first list is used if
    # `data.seq_len` is at most `rope_trained_len`, and the second list for longer sequences.
    rope_factors: list[float] | None = None
    # Whether neighbouring dimensions of a head are rotated together, as in Command R.
    rope_interleaved: bool = False
    # Whether queries, keys and values have a bias, as in Qwen 2.
    qkv_bias: bool = False
    # Whether the output of attention has a bias.
    output_bias: bool = False
    # Whether queries and keys of each head are normalised, as in Qwen 3.
    qk_norm: bool = False
    # Whether `qk_norm` normalises all heads of a token together, as in OLMo 3.
    qk_norm_all_heads: bool = False
    # Whether each query head has a learned sink, as in gpt-oss. A sink is an additional logit in the softmax.
    sinks: bool = False
    # The factor that multiplies the scores of attention. If None, the factor is `1 / sqrt(head_dim)`.
    attention_scale: float | None = None
    # The norm: "rms" (RMSNorm), "rms_plus_one" (its weight is added to 1, as in Gemma) or "layer" (LayerNorm without bias).
    norm: str = "rms"
    # The number that a norm adds to the mean square or to the variance.
    norm_eps: float = 1e-5
    # Whether norms are "before" attention and the feed-forward network, "after" them (OLMo 3) or "both" (Gemma 3).
    norm_position: str = "before"
    # Whether attention and the feed-forward network have the same input, as in Command R.
    parallel: bool = False
    # The activation of the feed-forward network: "silu", "gelu" (approximated by tanh) or "clamped" (gpt-oss).
    activation: str = "silu"
    # The factor of the embeddings.
    embedding_scale: float = 1.0
    # The factor that multiplies the outputs of a layer before they are added to the residual stream.
    residual_scale: float = 1.0
    # The factor of the logits.
    logit_scale: float = 1.0
    # Whether the embedding and the output head share one matrix.
    tie_embeddings: bool = True
    # The number of tokens to which a token attends: itself and the tokens directly before it. None: all earlier tokens.
    window: int | None = None
    # The attention of each layer, as a list such as [sliding,sliding,full]. The list repeats for further layers. "sliding" uses
    # `window`, and "full" does not. "sliding-nope" and "full-nope" have no rotary embedding. None: all layers have `window`.
    layer_types: list[str] | None = None

    @property
    def resolved_head_dim(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def resolved_ffn_dim(self) -> int:
        return self.ffn_dim or round_up(8 * self.dim // 3, 64)

    @property
    def rotary_dim(self) -> int:
        return int(self.rotary_fraction * self.resolved_head_dim)

    def layer(self, index: int) -> LayerAttention:
        """Return the attention settings of layer `index`, counted from 0."""
        types = self.layer_types or ["full" if self.window is None else "sliding"]
        kind, _, nope = types[index % len(types)].partition("-")
        is_local, dim = kind == "sliding", 0 if nope else self.rotary_dim
        factors = tuple(self.rope_factors or ())[: dim // 2]
        rope = Rope(dim, self.rope_theta, self.rope_factor, self.rope_trained_len, self.rope_scaling, factors)
        if is_local and self.local_rope_theta is not None:
            rope = Rope(dim, self.local_rope_theta)
        return LayerAttention(self.window if is_local else None, rope)

    def for_length(self, seq_len: int) -> "ModelConfig":
        """Return the settings for sequences of `seq_len` tokens, with LongRoPE's divisors for this length."""
        if self.rope_factors is None or seq_len <= (self.rope_trained_len or seq_len):
            return self
        return replace(self, rope_factors=self.rope_factors[self.rotary_dim // 2 :] * 2)

    @property
    def has_sliding_layer(self) -> bool:
        return any(kind.startswith("sliding") for kind in self.layer_types or [])

    @property
    def windows(self) -> list[int | None]:
        return [self.layer(index).window for index in range(self.layers)]


@dataclass
class MixSource(Frozen):
    """One source of a mixture. Except for `name` and `weight`, the settings mean the same as in DataConfig."""

    name: str | None = None
    weight: float = 1.0
    source: str = "stdlib"
    path: str | None = None
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    messages_column: str = "messages"
    join: str = "none"


@dataclass
class DataConfig(Frozen):
    """The text and the tokenizer, and how documents are packed into sequences."""

    # The kind of text: "stdlib" or "packages" (the source code of Python's standard library, one document per file or per
    # package), "text" (one document per file), "jsonl" (per line), "parquet" (per row), "hub" (a dataset of the Hugging Face
    # hub), "prepared" (a folder that ringattn-prepare has written), "recall" (a generated task, whose answers lie far back) or
    # "mix" (the sources in `mix`).
    source: str = "stdlib"
    # The sources of a mixture, for example [{name:web,source:jsonl,path:web.jsonl,weight:0.7},{source:packages,weight:0.3}].
    # Each source provides tokens in proportion to its weight. A source can also set `name` (by default `source`), `source`,
    # `path`, `subset`, `split`, `column`, `messages_column` and `join`. The fraction `eval_fraction` of every source is held
    # out.
    mix: list[MixSource] = field(default_factory=list)
    # The action when the text, or a source of a mixture, has been read to its end. With "repeat", the run reads the text again
    # in another order, and prints a message. With "end", the run ends with its text.
    exhausted: str = "repeat"
    # Whether the text is tokenised during training instead of before the first step. Requires "jsonl", "parquet" or "hub".
    streaming: bool = False
    # With `streaming`, the number of documents that are shuffled together in host memory.
    shuffle_buffer: int = 10_000
    # The text: a file, a folder with its subfolders, a glob pattern, or the name of a hub dataset. From a folder, "jsonl" and
    # "parquet" read only files with a matching suffix. The sources "stdlib", "packages" and "recall" need no path.
    path: str | None = None
    # The configuration of a hub dataset. None: the default configuration.
    subset: str | None = None
    # The part of the text for training, such as "train" or "train[:95%]".
    split: str = "train"
    # The held-out part, such as "train[95%:]". None: "train" if `eval_path` is set, and otherwise `eval_fraction` of the text.
    eval_split: str | None = None
    # The files or the dataset for evaluation. None: the same as `path`.
    eval_path: str | None = None
    # The held-out fraction of the tokens, at least one sequence. Setting `eval_split` or `eval_path` replaces this fraction. 0:
    # no evaluation.
    eval_fraction: float = 0.01
    # The content of "jsonl", "parquet" and "hub": "text", "chat" (messages for the tokenizer's chat template) or
    # "prompt_completion" (the columns prompt and completion). With "chat" and "prompt_completion", only answers and completions
    # have a loss. Records with more than `seq_len` tokens are dropped.
    format: str = "text"
    # The column that contains the text, if `format` is "text".
    column: str = "text"
    # The column of messages, if `format` is "chat": lists of objects with role and content. The template also gets the column
    # `tools`, if it exists.
    messages_column: str = "messages"
    # "folder": with "text" and "stdlib", each folder directly in `path`, including its subfolders, becomes one document. The
    # document contains the files in the order of their names, each after a line with its name.
    join: str = "none"
    # The maximum size of a document in MB (10**6 bytes). A larger document is an error, because tokenising needs about 10 times
    # its size in memory.
    max_document_mb: int = 200
    # The action at a faulty file, line or row, for example one that is not UTF-8. With "raise", the run ends with an error.
    # With "skip", the run skips and counts the text.
    on_error: str = "raise"
    # The number of processes per host that tokenise the text. None: the host's CPU cores divided by its ranks, or fewer for a
    # small text.
    num_proc: int | None = None
    # The tokenizer: "bytes", or the path of a tokenizer.json.
    tokenizer: str = "bytes"
    # The end-of-text token of a tokenizer.json, quoted twice on the command line: 'data.eos_token="<|im_end|>"'. None: the
    # token in tokenizer_config.json or config.json in the same folder, or a token with a common name such as "<|endoftext|>".
    eos_token: str | None = None
    # The encoding of names of special tokens, such as <|im_start|>, in a text or a prompt. "text" encodes names as
    # ordinary text. "parse" encodes names as special tokens, for text from a chat template, and requires a tokenizer.json.
    special_tokens: str = "text"
    # The number of tokens per sequence, over all ranks that share the sequence.
    seq_len: int = 512
    # Whether a token attends only to its own document, or to all earlier tokens of the sequence.
    mask_documents: bool = True
    # The packing of documents into sequences. The value "stream" joins all documents and cuts them after every `seq_len`
    # tokens. The value "best-fit" cuts only documents with more than `seq_len` tokens, and needs little padding (Ding et al.
    # 2024). The held-out text is always a stream.
    packing: str = "stream"
    # The seed of the random order of the documents. Every epoch has another order.
    seed: int = 0
    # The number of sequences per group. The sequences of a group have a similar cost of attention, so data-parallel ranks are
    # equally busy. If None, a group contains the sequences of one micro-step. By default, a single data-parallel rank, mixtures
    # and `mask_documents=false` disable groups. A resumed run keeps the group size of its checkpoint.
    group_size: int | None = None

    @property
    def columns(self) -> list[str]:
        columns = {"text": [self.column], "chat": [self.messages_column], "prompt_completion": ["prompt", "completion"]}
        return columns[self.format]

    @property
    def members(self) -> dict[str, "DataConfig"]:
        """Return the settings of each source of a mixture, by name."""
        values = [{key: value for key, value in vars(source).items() if key not in ("name", "weight")} for source in self.mix]
        return {
            source.name or source.source: replace(self, mix=[], **each) for source, each in zip(self.mix, values, strict=True)
        }

    @property
    def weights(self) -> list[float]:
        return [source.weight for source in self.mix]

    @property
    def description(self) -> str:
        """Return the source and the path as on the command line."""
        if self.mix:
            return f"data.source=mix of {', '.join(self.members)}"
        return f"data.source={self.source}" + (f" data.path={self.path}" if self.path else "")

    @property
    def held_out(self) -> "DataConfig | None":
        """Return the settings of separate held-out text, or None."""
        if self.eval_split is None and self.eval_path is None:
            return None
        path, split = self.eval_path or self.path, self.eval_split or DataConfig.split
        # Use a fixed seed, so that all runs are evaluated on the same text.
        return replace(self, path=path, split=split, eval_path=None, eval_split=None, eval_fraction=0.0, seed=0)

    @property
    def resolved_eval_fraction(self) -> float:
        """Return `eval_fraction`, or 0 if the held-out text is separate or generated."""
        return self.eval_fraction if self.held_out is None and self.source != "recall" else 0.0


@dataclass
class ParallelConfig(Frozen):
    """How the work is divided among a mesh of data-parallel x ring x Ulysses ranks. Parameters are sharded over all ranks."""

    # "sizes" (`ring` and `ulysses` determine the mesh) or "fastest" (the mesh with the highest predicted tokens/s for
    # `trainer.tokens_per_step` that fits into memory; `ring` and `ulysses` must not be set).
    mesh: str = "sizes"
    # The number of ranks that share one sequence, which must divide the number of all ranks. None: all ranks.
    ring: int | None = None
    # The number of ranks that exchange heads in one all-to-all. A larger number means shorter rings, with fewer hops. The value
    # 0 selects the largest number that divides both the ranks of a sequence and the query heads. None selects the size with the
    # shortest predicted step.
    ulysses: int | None = 1
    # The assignment of tokens to ranks: "contiguous", "zigzag", "striped" or "auto". In every step, "auto" selects the layout
    # with the least work for the busiest rank.
    layout: str = "auto"
    # The tensors that circulate on the ring: "state" (queries and partial softmax states), "kv" (keys and values) or "auto".
    # The value "auto" selects "state" if the predicted gain is at least 3%. On CPUs, "auto" selects "state".
    schedule: str = "auto"
    # The route of the circulating tensors. With "relay", neighbours pass tensors on, over NCCL or gloo. With "direct", each
    # tensor goes to the rank that needs it. Inside one host, "auto" selects "direct".
    route: str = "auto"
    # The attention kernels: "hopper", "triton", "blockwise", "reference" or "auto". The value "auto" selects the fastest
    # kernels that support the device and the shapes.
    kernel: str = "auto"
    # The timeout of a collective in seconds. For hops of a ring, RINGATTN_TIMEOUT overrides this setting.
    timeout_s: int = 600


@dataclass
class MemoryConfig(Frozen):
    """Decides where a rank keeps the data of a step. By default, the run chooses the fastest plan that fits into memory."""

    # The storage of the blocks' intermediate results. "keep" uses GPU memory. "recompute" makes the backward pass recompute the
    # blocks, except for attention. "recompute-all" includes attention. "offload" is "recompute", but the inputs and the
    # attention results of all blocks except the last are in host memory. "offload-inputs" is "recompute-all" with the inputs in
    # host memory. "auto" selects the fastest combination that fits, which may differ between blocks.
    activations: str = "auto"
    # The storage of the blocks' fp32 weights, gradients and AdamW state. The value "keep" uses GPU memory. The value "offload"
    # uses host memory, and the CPU updates the blocks during the next forward pass. The value "auto" offloads the number of
    # blocks that makes the step fastest.
    optimizer: str = "auto"
    # The storage of AdamW's two moments: "fp32" or "8bit". With "8bit", the moments of matrices have 8 bits per element
    # (torchao), which needs a quarter of the memory. Moments in 8 bits stay in GPU memory.
    moments: str = "fp32"
    # The number of tokens that a rank processes at once in norms, projections, feed-forward networks and experts. The backward
    # pass recomputes one chunk at a time. None selects all tokens if the memory suffices, or else 16,384 tokens. 0: all tokens.
    chunk: int | None = None


@dataclass
class OptimConfig(Frozen):
    """AdamW, gradient clipping and the schedule of the learning rate."""

    # The peak learning rate. None: 6e-4 for 124 million parameters, and lower for larger models. `model.qk_norm` multiplies the
    # default by 1.75. If the run starts from trained weights, the default is divided by 10. The run prints its rate.
    lr: float | None = None
    # AdamW's decay rates for the averages of the gradient and of the squared gradient.
    betas: tuple[float, float] = (0.9, 0.95)
    # The number that AdamW adds to its denominator.
    eps: float = 1e-8
    # The weight decay of matrices. Biases and the weights of norms have no weight decay.
    weight_decay: float = 0.1
    # The largest global norm of the gradients. Gradients with a larger norm are scaled down. None: no clipping.
    clip: float | None = 1.0
    # The learning rate after the warmup: "cosine", or "wsd" (warmup, stable, decay).
    schedule: str = "cosine"
    # The number of steps in which the learning rate rises linearly. None: a tenth of `trainer.steps`.
    warmup_steps: int | None = None
    # The fraction of all steps, at the end of the run, in which "wsd" lowers the learning rate.
    decay_fraction: float = 0.2
    # The learning rate of the last step, divided by `lr`.
    min_lr_ratio: float = 0.1


@dataclass
class TrainerConfig(Frozen):
    """The length of a run, its device, its checkpoints and its outputs."""

    # The number of optimizer steps of the whole run. If set, `total_tokens` determines this number.
    steps: int = 1500
    # The number of tokens of the whole run, over all ranks. Set `total_tokens` and `tokens_per_step` to compare sequence
    # lengths. If None, `steps` determines the number of tokens.
    total_tokens: int | None = None
    # Sequences per data-parallel rank and micro-step.
    batch_size: int = 1
    # Micro-steps per optimizer step, unless `tokens_per_step` is set.
    accumulate: int = 1
    # The number of tokens per optimizer step, over all ranks. The number must be a multiple of the tokens of a micro-step:
    # `data.seq_len` x `batch_size` x data-parallel ranks. If None, `accumulate` determines the number of tokens. In a sweep
    # over `data.seq_len`, the default is the smallest number that suits all lengths.
    tokens_per_step: int | None = None
    # The seed of the initial parameters.
    seed: int = 0
    # "cpu", "cuda" or "auto" (CUDA if it is available).
    device: str = "auto"
    # The precision of forward and backward: "fp32", "bf16" or "auto" (bf16 on CUDA, fp32 on CPUs). Parameters and optimizer
    # state are always fp32.
    precision: str = "auto"
    # The use of FP8 in the forward pass of attention: "never", "inference" (in evaluation, and for the prompt in generation) or
    # "always" (also in training). The backward pass of attention never uses FP8.
    fp8_attention: str = "never"
    # Whether the linear layers of the blocks use FP8 in training steps (one scale per tensor). Evaluation and
    # generation use bf16, and the MFU stays relative to the peak of bf16. FP8 layers require a GPU of compute capability 8.9 or
    # newer, and widths that are multiples of 16.
    float8: bool = False
    # Whether every run computes exactly the same bits. On Hopper GPUs, the backward pass of attention then takes up to 20%
    # longer.
    deterministic: bool = False
    # Whether torch.compile fuses the loss and the operations around attention. None: only on GPUs.
    compile: bool | None = None
    # Whether training steps are replayed from CUDA graphs, to save time on the host. With CUDA graphs, the ring circulates keys
    # and values, unless `parallel.schedule` is set. None selects CUDA graphs only if the blocks are so small that the GPU might
    # wait for the host. Graphs require a GPU, torch.compile, no recomputed blocks, at most 256 MiB of block parameters (1,024
    # with only one rank), and shards of equal length.
    cuda_graphs: bool | None = None
    # The number of steps between two checkpoints. 0: only one checkpoint, at the end.
    checkpoint_every: int = 250
    # Whether the run saves a checkpoint after its last step. A run that stops early always saves a checkpoint. Without a last
    # checkpoint, the trained model is lost. Another launch repeats the steps after the latest checkpoint.
    save_final: bool = True
    # Whether training continues while a checkpoint is written. A background save first copies the checkpoint to host memory.
    # None: only if the run saves before its last step, and half of the available host memory suffices.
    background_saves: bool | None = None
    # The number of recent checkpoints that the run keeps.
    keep_checkpoints: int = 2
    # The number of steps between two evaluations on the held-out text. 0: only one evaluation, at the end.
    eval_every: int = 500
    # The number of target tokens: the held-out tokens whose loss an evaluation computes. The target tokens are spread over the
    # text, and do not depend on `data.seq_len`. If the text has fewer tokens, all tokens are target tokens.
    eval_tokens: int = 8_192
    # The number of seconds after the launch of torchrun until the run stops with a checkpoint. The run completes its current
    # step, but interrupts an evaluation or a step of several micro-steps. None: no limit.
    time_limit_s: float | None = None
    # "auto" (the latest checkpoint of this run), "never", or the path of a checkpoint. If the checkpoint belongs to another
    # run, this run branches from that run. If the checkpoint belongs to this run, every launch starts from this checkpoint.
    resume: str = "auto"
    # A checkpoint, or the folder of a Hugging Face model, from which a new run takes its weights. Steps, optimizer and data
    # start from the beginning. None: random weights.
    init_from: str | None = None
    # The number of steps between two lines on the console. The file metrics.jsonl contains every step. If None, the console
    # shows a launch's first three steps, and then at most one step every five seconds. The last step and evaluations are always
    # shown.
    log_every: int | None = None
    # The number of tokens that a run generates at its end, or 0. Launching a completed run again generates another sample.
    sample_tokens: int = 128
    # The text that the sample continues. None: the first 256 tokens of the longest held-out document, or "def " without
    # held-out text.
    sample_prompt: str | None = None
    # The peak TFLOP/s of one device, for the model FLOPs utilisation (MFU). If None, the peak of a known GPU comes from a
    # table. Unknown GPUs show no MFU.
    peak_tflops: float | None = None
    # The steps to profile: a range such as 10-12, or true for three steps after the warm-up of each launch. Every rank writes a
    # torch.profiler trace to the run's folder profile/, and on GPUs also a memory snapshot. None: no step.
    profile: str | None = None

    def attention_precision(self, training: bool) -> str:
        uses_fp8 = self.fp8_attention == "always" or (self.fp8_attention == "inference" and not training)
        return "fp8" if uses_fp8 else "ieee"

    @property
    def is_profiled(self) -> bool:
        return self.profile is not None and self.profile.lower() != "false"

    @property
    def profiled_range(self) -> tuple[int, int] | None:
        """Return the first and the last step in `profile`, or None if `profile` is not a range."""
        match = re.fullmatch(r"([0-9]+)-([0-9]+)", self.profile or "")
        return (int(match[1]), int(match[2])) if match else None


@dataclass
class LoggerConfig(Frozen):
    """Weights & Biases. Metrics are always written to the console and to metrics.jsonl as well."""

    # Weights & Biases: "online", "offline" (to a folder of the run), "off" or "auto". "auto" is the variable WANDB_MODE, or
    # else "online" after `wandb login`, and otherwise "offline".
    wandb: str = "auto"
    # The project in Weights & Biases. None: the variable WANDB_PROJECT, or "ringattn".
    project: str | None = None


@dataclass
class Config(Frozen):
    """All settings of a run."""

    # The name of the run, and of its directory under `outputs/`. Launching the same name again resumes the run. The default
    # name is the time of the launch.
    name: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of the settings with some values replaced. The mapping `values` contains the new values by name, such as
    "trainer.steps" and "name".
    """
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, _, option = name.rpartition(".")
        groups.setdefault(group, {})[option] = value
    own = groups.pop("", {})
    return replace(config, **own, **{group: replace(getattr(config, group), **each) for group, each in groups.items()})


# The names of the groups of settings, such as "trainer".
GROUPS = tuple(group.name for group in fields(Config) if group.name != "name")

# The names of all settings, such as "trainer.steps".
SETTINGS = tuple(f"{group}.{setting}" for group in GROUPS for setting in vars(getattr(Config(), group)))

# The model settings in which a run may differ from its initial weights
MAY_DIFFER = {
    "rope_theta",
    "rope_factor",
    "rope_trained_len",
    "rope_scaling",
    "rope_factors",
    "norm_eps",
    "window",
    "layer_types",
    "local_rope_theta",
    "balance_loss",
}

# The number of consecutive elements of a matrix row that share a scale in 8-bit moments.
MOMENT_BLOCK = 256

# The smallest share of a source in a mixture
MIN_SHARE = 1e-6

# The values of `model.layer_types`.
LAYER_TYPES = ("sliding", "full", "sliding-nope", "full-nope")

# The valid values of each setting that accepts only a few values.
CHOICES = {
    "model.rope_scaling": ("llama3", "yarn", "yarn-exact", "linear", "longrope"),
    "model.norm": ("rms", "rms_plus_one", "layer"),
    "model.norm_position": ("before", "after", "both"),
    "model.activation": ("silu", "gelu", "clamped"),
    "data.source": ("stdlib", "packages", "text", "jsonl", "parquet", "hub", "prepared", "recall", "mix"),
    "data.exhausted": ("repeat", "end"),
    "data.on_error": ("raise", "skip"),
    "data.format": ("text", "chat", "prompt_completion"),
    "data.packing": ("stream", "best-fit"),
    "data.join": ("none", "folder"),
    "data.special_tokens": ("text", "parse"),
    "parallel.mesh": ("sizes", "fastest"),
    "parallel.layout": (*KINDS, "auto"),
    "parallel.schedule": SCHEDULES,
    "parallel.route": ROUTES,
    "parallel.kernel": BACKENDS,
    "memory.activations": ("auto", "keep", "recompute", "recompute-all", "offload", "offload-inputs"),
    "memory.optimizer": ("auto", "keep", "offload"),
    "memory.moments": ("fp32", "8bit"),
    "optim.schedule": ("cosine", "wsd"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.precision": ("auto", "fp32", "bf16"),
    "trainer.fp8_attention": ("never", "inference", "always"),
    "logger.wandb": ("auto", "online", "offline", "off"),
}

# The smallest and the largest valid value of each numeric setting that is not None. Larger values are unrealistic or would
# overflow.
RANGES = {
    "model.vocab_size": (1, 2**30),
    "model.layers": (1, 4096),
    "model.dim": (1, 2**20),
    "model.heads": (1, 2**14),
    "model.kv_heads": (1, 2**14),
    "model.head_dim": (1, 2**14),
    "model.ffn_dim": (1, 2**24),
    "model.experts": (1, 2**14),
    "model.experts_per_token": (1, 2**14),
    "model.balance_loss": (0, 1e3),
    "model.rope_theta": (1, 1e12),
    "model.local_rope_theta": (1, 1e12),
    "model.rotary_fraction": (0, 1),
    "model.rope_factor": (1, 1e6),
    "model.rope_trained_len": (1, 2**31 - 1),
    "model.norm_eps": (1e-12, 0.1),
    "model.attention_scale": (1e-6, 1e3),
    "model.embedding_scale": (1e-6, 1e6),
    "model.residual_scale": (1e-6, 1e3),
    "model.logit_scale": (1e-6, 1e3),
    "model.window": (1, 2**31 - 1),
    "data.seq_len": (1, 2**31 - 1),
    "data.shuffle_buffer": (1, 2**40),
    "data.max_document_mb": (1, 2000),
    "data.num_proc": (1, 4096),
    "data.eval_fraction": (0, 0.99),
    "data.seed": (0, 2**63 - 1),
    "data.group_size": (1, 2**40),
    "parallel.ring": (1, 2**20),
    "parallel.ulysses": (0, 2**14),
    "parallel.timeout_s": (1, 604_800),  # a week
    "memory.chunk": (0, 2**31 - 1),
    "optim.lr": (1e-30, 100),
    "optim.eps": (1e-30, 1),
    "optim.weight_decay": (0, 100),
    "optim.clip": (1e-9, 1e9),
    "optim.warmup_steps": (0, 99_999_999),
    "optim.decay_fraction": (1e-9, 1),
    "optim.min_lr_ratio": (0, 1),
    "trainer.steps": (1, 99_999_999),  # The name of a checkpoint contains its step as eight digits.
    "trainer.total_tokens": (1, 2**53),
    "trainer.batch_size": (1, 2**20),
    "trainer.accumulate": (1, 2**20),
    "trainer.tokens_per_step": (1, 2**53),
    "trainer.seed": (0, 2**63 - 1),
    "trainer.checkpoint_every": (0, 2**31 - 1),
    "trainer.keep_checkpoints": (1, 2**31 - 1),
    "trainer.eval_every": (0, 2**31 - 1),
    "trainer.eval_tokens": (1, 2**53),
    "trainer.time_limit_s": (1e-9, 1e9),
    "trainer.log_every": (1, 2**31 - 1),
    "trainer.sample_tokens": (0, 2**20),
    "trainer.peak_tflops": (1e-6, 1e6),
}


def check(config: Config, world_size: int) -> None:
    """Check every setting by itself, and the combinations of settings.

    Raises:
        ConfigError: names the first invalid setting.
    """
    check_values(config)
    problems = _check_unused(config), _check_model(config.model), _check_parallel(config, world_size), _check_training(config)
    for problem in chain(*problems, _check_mixture(config), _check_streaming(config.data)):
        raise ConfigError(problem)


def check_values(config: Config) -> None:
    """Check every setting by itself. Errors as in `check`."""
    for problem in _find_invalid_values(config):
        raise ConfigError(problem)


def check_mesh(config: Config, world_size: int) -> None:
    """Check `parallel.ring` and `parallel.ulysses`. Errors as in `check`."""
    for problem in _check_parallel(config, world_size):
        raise ConfigError(problem)


# The following functions yield a message for every invalid setting.


def _find_invalid_values(config: Config) -> Iterator[str]:
    prompt = config.trainer.sample_prompt
    if prompt is not None and (decodable := replace_invalid(prompt)) != prompt:
        yield f"trainer.sample_prompt={decodable}: must be UTF-8, but some characters (shown as ?) are not: encode it again"
    for name, allowed in CHOICES.items():
        value = attrgetter(name)(config)
        if value not in allowed:
            yield f"unknown {name}={value}: choose one of {', '.join(allowed)}"
    for name, (low, high) in RANGES.items():
        value = attrgetter(name)(config)
        # Every comparison of NaN with a number is false, so NaN is invalid for every setting.
        if value is not None and not low <= value <= high:
            yield f"{name}={value}: must be from {low} to {high}"
    model = config.model
    if model.layer_types is not None:
        listed = f"model.layer_types=[{','.join(map(str, model.layer_types))}]"
        if not 1 <= len(model.layer_types) <= model.layers:
            yield f"{listed}: must have from 1 to model.layers={model.layers} elements"
        if any(kind not in LAYER_TYPES for kind in model.layer_types):
            yield f"{listed}: every element must be one of {', '.join(LAYER_TYPES)}"


def _check_unused(config: Config) -> Iterator[str]:
    for name, value, reason in unused_settings(config):
        yield f"{name}={value} has no effect {reason}, or leave {name} out"


def unused_settings(config: Config) -> Iterator[tuple[str, object, str]]:
    """Yield the name, the value and the reason of each setting without effect."""
    for names, is_unused, reason in _reasons_without_effect(config):
        for name in names.split():
            value = attrgetter(name)(config)
            if is_unused and value != attrgetter(name)(Config()):
                yield name, value, reason


def _reasons_without_effect(config: Config) -> tuple[tuple[str, bool, str], ...]:
    """Return the names of settings, whether these settings have no effect, and the reason."""
    model, data, optim = config.model, config.data, config.optim
    return (
        (
            "data.path data.subset data.split data.column data.messages_column data.join",
            data.source == "mix",
            "if data.source=mix: set it for the sources in data.mix",
        ),
        (
            "data.eval_split data.eval_path",
            data.source == "mix",
            "if data.source=mix, which holds out a part of every source: set data.eval_fraction",
        ),
        ("data.mix", data.source != "mix", f"if data.source={data.source}: choose data=mix"),
        ("data.exhausted", data.source == "recall", "if data.source=recall, which never runs out: choose another source"),
        (
            "data.path data.eval_path",
            data.source in ("stdlib", "packages", "recall"),
            f"if data.source={data.source}: choose data=text, jsonl, parquet, hub or prepared",
        ),
        (
            "data.max_document_mb data.on_error",
            data.source in ("stdlib", "packages", "recall", "prepared"),
            f"if data.source={data.source}: choose data=text, jsonl, parquet or hub",
        ),
        (
            "data.num_proc",
            data.source in ("recall", "prepared"),
            f"if data.source={data.source}, which needs no tokenisation: choose another source",
        ),
        (
            "data.split data.eval_split data.eval_fraction data.group_size",
            data.source == "recall",
            "if data.source=recall, which generates other sequences for evaluation: choose another source",
        ),
        ("data.shuffle_buffer", not data.streaming, "without data.streaming: set data.streaming=true"),
        ("data.group_size", data.streaming, "with data.streaming: leave data.streaming out"),
        ("data.subset", data.source != "hub", f"if data.source={data.source}: choose data=hub"),
        (
            "data.column",
            data.source in ("stdlib", "packages", "text", "recall", "prepared"),
            f"if data.source={data.source}: choose data=jsonl, parquet or hub",
        ),
        ("data.column", data.format != "text", f"if data.format={data.format}: set data.messages_column, or data.format=text"),
        ("data.join", data.source not in ("stdlib", "text"), f"if data.source={data.source}: choose data=text or stdlib"),
        ("data.packing", data.streaming, "with data.streaming: leave data.streaming out"),
        ("data.packing", data.source == "recall", "if data.source=recall: choose another source"),
        ("data.packing", data.format != "text", f"if data.format={data.format}, whose records are never cut: leave it out"),
        ("data.messages_column", data.format != "chat", f"if data.format={data.format}: set data.format=chat"),
        ("data.messages_column", data.source == "prepared", "if data.source=prepared: choose another source"),
        ("model.rope_trained_len model.rope_scaling", model.rope_factor is None, "without model.rope_factor: set it"),
        (
            "model.rope_trained_len",
            model.rope_scaling == "linear",
            "with model.rope_scaling=linear: choose another value of it",
        ),
        (
            "model.rope_factors",
            model.rope_factor is None or model.rope_scaling != "longrope",
            "without model.rope_factor and model.rope_scaling=longrope: set them",
        ),
        (
            "model.window",
            model.layer_types is not None and not model.has_sliding_layer,
            "without a sliding layer: add one to model.layer_types",
        ),
        ("model.local_rope_theta", not model.has_sliding_layer, "without a sliding layer: add one to model.layer_types"),
        (
            "model.experts_per_token model.normalise_top_k model.expert_bias model.balance_loss",
            model.experts is None,
            "without model.experts: set it",
        ),
        ("model.qk_norm_all_heads", not model.qk_norm, "without model.qk_norm: set it"),
        ("optim.decay_fraction", optim.schedule != "wsd", f"if optim.schedule={optim.schedule}: choose optim=wsd"),
        (
            "data.eval_fraction",
            data.held_out is not None,
            f"with data.eval_split={data.eval_split} and data.eval_path={data.eval_path}: set both to null",
        ),
        (
            "trainer.eval_every trainer.eval_tokens",
            data.held_out is None and data.eval_fraction == 0,
            "without held-out text: set data.eval_split, data.eval_path or data.eval_fraction",
        ),
        ("trainer.sample_prompt", config.trainer.sample_tokens == 0, "if trainer.sample_tokens=0: raise it"),
        (
            "trainer.fp8_attention",
            config.trainer.fp8_attention == "inference"
            and (data.held_out is None and data.eval_fraction == 0 and config.trainer.sample_tokens == 0),
            "without held-out text and without trainer.sample_tokens: choose always",
        ),
        ("logger.project", config.logger.wandb == "off", "if logger.wandb=off: choose another value of it"),
    )


def _check_model(model: ModelConfig) -> Iterator[str]:
    heads, kv_heads, head_dim = model.heads, model.kv_heads, model.resolved_head_dim
    if heads % kv_heads:
        yield f"model.kv_heads={kv_heads} must divide model.heads={heads}: choose one of {_divisors(heads)}"
    if model.head_dim is None and model.dim % heads:
        yield f"model.heads={heads} must divide model.dim={model.dim}: change one of them, or set model.head_dim"
    if model.experts is not None and model.experts_per_token > model.experts:
        yield f"model.experts_per_token={model.experts_per_token} must not exceed model.experts={model.experts}: lower it"
    if model.parallel and model.norm_position != "before":
        yield f"model.parallel=true is impossible with model.norm_position={model.norm_position}: leave one of them out"
    if model.rope_factor is not None and model.rope_trained_len is None and model.rope_scaling != "linear":
        yield f"model.rope_factor={model.rope_factor} requires model.rope_trained_len: set it to the length of training"
    factors = model.rope_factors or []
    if model.rope_scaling == "longrope" and (len(factors) != model.rotary_dim or min(factors) <= 0):
        yield f"model.rope_scaling=longrope requires model.rope_factors with {model.rotary_dim} positive numbers: set them"
    if model.rope_scaling.startswith("yarn") and model.rope_theta <= 1:
        # YaRN divides by the logarithm of rope_theta, which must be positive.
        yield f"model.rope_theta={model.rope_theta} must be above 1 with model.rope_scaling={model.rope_scaling}: raise it"
    if model.has_sliding_layer and model.window is None:
        yield "sliding layers in model.layer_types require model.window: set it to their number of keys"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        yield (
            f"the head dim is {head_dim}: it must be even for rotary embeddings, and at most {MAX_HEAD_DIM} for the kernels; "
            "set model.head_dim, or change model.dim or model.heads"
        )
    if model.rotary_dim % 2 or not model.rotary_dim:
        yield (
            f"model.rotary_fraction={model.rotary_fraction} rotates {model.rotary_dim} of {head_dim} dimensions of a head: the "
            "number must be even and at least 2; for layers without rotary embedding, set model.layer_types=[full-nope]"
        )


def _check_parallel(config: Config, world_size: int) -> Iterator[str]:
    ring, ulysses = config.parallel.ring or world_size, config.parallel.ulysses or 1
    seq_len, heads = config.data.seq_len, config.model.heads
    if world_size % ring:
        yield f"parallel.ring={ring} must divide the number of ranks, {world_size}: choose one of {_divisors(world_size)}"
    if seq_len < ring:
        yield f"data.seq_len={seq_len} must be at least the number of ranks that share a sequence, {ring}: change one of them"
    if ring % ulysses or heads % ulysses:
        yield (
            f"parallel.ulysses={ulysses} must divide model.heads={heads} and the {ring} ranks that share a sequence: choose "
            f"one of {_divisors(math.gcd(ring, heads))}"
        )


def _check_training(config: Config) -> Iterator[str]:
    optim, trainer = config.optim, config.trainer
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"optim.betas={list(optim.betas)}: must be two numbers from 0 to below 1, such as [0.9,0.95]"
    if (optim.warmup_steps or 0) > trainer.steps:
        yield f"optim.warmup_steps={optim.warmup_steps} must not exceed trainer.steps={trainer.steps}: change one of them"
    if config.data.source == "recall" and not config.data.mask_documents:
        # The documents of a recall sequence assign different values to the same keys. A query must therefore not attend to
        # other documents.
        yield "data.mask_documents=false is impossible with data.source=recall: leave it out"
    if config.memory.activations.startswith("offload") and config.model.layers == 1:
        given = f"memory.activations={config.memory.activations}"
        yield f"{given} requires at least two layers, because the last one stays on the GPU: leave it out"
    if config.memory.moments == "8bit":
        if config.memory.optimizer == "offload":
            yield "memory.moments=8bit is impossible with memory.optimizer=offload, which requires fp32: leave one of them out"
        model = config.model
        widths = {"model.dim": model.dim, "model.heads x head dim": model.heads * model.resolved_head_dim}
        for name, width in (widths | {"the hidden width (model.ffn_dim)": model.resolved_ffn_dim}).items():
            if width % MOMENT_BLOCK:
                yield f"memory.moments=8bit requires multiples of {MOMENT_BLOCK}, but {name} is {width}: change it, or use fp32"
    data = config.data
    if data.format != "text" and data.source not in ("jsonl", "parquet", "hub", "prepared"):
        yield f"data.format={data.format} is impossible with data.source={data.source}: choose data=jsonl, parquet or hub"
    if data.format == "chat" and data.tokenizer == "bytes":
        yield "data.format=chat requires the chat template of a tokenizer: set data.tokenizer to the path of its tokenizer.json"
    if data.format != "text" and not data.mask_documents:
        yield f"data.mask_documents=false is impossible with data.format={data.format}: leave it out"
    if trainer.init_from is not None and trainer.resume not in ("auto", "never"):
        yield (
            f"trainer.init_from={trainer.init_from} and trainer.resume={trainer.resume} contradict each other: set only "
            "init_from to start a new run from weights, or only resume to continue a run"
        )
    if trainer.is_profiled and str(trainer.profile).lower() != "true":
        first, last = trainer.profiled_range or (0, 0)
        if not 1 <= first <= last <= trainer.steps:
            yield f"trainer.profile={trainer.profile}: must be true or a range of steps from 1 to {trainer.steps}, such as 3-5"


def _check_streaming(data: DataConfig) -> Iterator[str]:
    if not data.streaming:
        return
    if data.source not in ("jsonl", "parquet", "hub"):
        yield f"data.streaming=true is impossible with data.source={data.source}: choose data=jsonl, parquet or hub"
    if data.format != "text":
        yield f"data.streaming=true is impossible with data.format={data.format}: leave data.streaming out"
    if not re.fullmatch(r"\w+" if data.source == "hub" else "train|all", data.split):
        yield f"data.split={data.split} is impossible with data.streaming=true, which reads whole splits: leave one of them out"
    if data.exhausted == "end":
        yield "data.exhausted=end is impossible with data.streaming=true, because the size of the text is unknown: leave it out"
    if data.held_out is None and data.eval_fraction > 0:
        yield (
            "data.streaming=true cannot hold out data.eval_fraction of a text of unknown size: set data.eval_path to other "
            "files, data.eval_split to another split of the hub, or data.eval_fraction=0"
        )


def _check_mixture(config: Config) -> Iterator[str]:
    data = config.data
    if data.source == "mix" and not data.mix:
        yield "data.source=mix requires data.mix: set it, for example to [{source:jsonl,path:web.jsonl,weight:0.7},...]"
    names = [source.name or source.source for source in data.mix]
    total = sum(source.weight for source in data.mix)
    for name, source in zip(names, data.mix, strict=True):
        if names.count(name) > 1:
            yield f"data.mix has {names.count(name)} sources with the name {name}: give every source another name"
        if not re.fullmatch(r"[\w.-]+", name):
            yield f"data.mix has a source with the name {name!r:.60}: use letters, digits, dots, hyphens and underscores"
        if not 0 < source.weight < math.inf:
            yield f"data.mix: {name}: weight={source.weight}: must be greater than 0"
        if source.weight < MIN_SHARE * total:
            yield f"data.mix: {name}: weight={source.weight}: must be at least {MIN_SHARE} of the sum of the weights, {total}"
        if source.source in ("mix", "recall"):
            yield f"data.mix: {name}: source={source.source} is impossible in a mixture: choose another source"
        # Settings that all sources share are not reported as unused.
        shared = {
            f"data.{each}": getattr(DataConfig, each) for each in ("max_document_mb", "exhausted", "on_error", "num_proc")
        }
        member = with_settings(replace(config, data=data.members[name]), shared)
        for problem in chain(_find_invalid_values(member), _check_unused(member), _check_training(member)):
            yield f"data.mix: {name}: {problem}"


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
