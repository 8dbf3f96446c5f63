"""The typed configuration: defaults here < YAML in configs/ < the command line, checked once before anything starts."""

import math
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ringattn import layout
from ringattn.kernels import dispatch
from ringattn.kernels.validation import MAX_HEAD_DIM
from ringattn.planning import rank_plan


class ConfigError(ValueError):
    """A setting, file or combination that cannot be honoured: the message says what, why and what to do."""


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass
class ModelConfig:
    """A GPT."""

    vocab_size: int | None = None  # None: the tokenizer's; a larger one keeps a model's published size
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None  # None: dim / heads
    ffn_dim: int | None = None  # None: 8/3 dim, rounded up to a multiple of 64
    rope_theta: float = 10_000.0
    rope_factor: float | None = None  # how much slower features turn that turn seldom in rope_trained_len; None: all as ever
    rope_trained_len: int | None = None  # tokens of the sequences before; given with rope_factor, and only then
    rope_scaling: str = "llama3"  # llama3 | yarn: which features those are; yarn sharpens attention, too
    qkv_bias: bool = False  # of queries, keys and values, as in Qwen 2
    qk_norm: bool = False  # of every head's queries and keys, as in Qwen 3
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    window: int | None = None  # keys a query may see, itself included; None: all before it

    @property
    def resolved_head_dim(self) -> int:
        """Of a head: `head_dim`, where it is given."""
        return self.head_dim or self.dim // self.heads

    @property
    def resolved_ffn_dim(self) -> int:
        """Between the two layers of SwiGLU: `ffn_dim`, where it is given."""
        return self.ffn_dim or round_up(8 * self.dim // 3, 64)


@dataclass
class DataConfig:
    """Where documents come from and how they are cut into sequences."""

    source: str = "stdlib"  # stdlib | text | jsonl | parquet | hub
    path: str | None = None  # a file or glob for text, jsonl, parquet; a dataset name for hub
    subset: str | None = None  # hub: the dataset's configuration
    split: str = "train"
    # of held-out text, whose loss is taken now and then: where both are None there is none
    eval_split: str | None = None  # another split, or part of one as 'train[95%:]'; None: train
    eval_path: str | None = None  # other files, or another dataset; None: those of training
    column: str = "text"
    tokenizer: str = "bytes"  # bytes | the path of a tokenizer.json
    seq_len: int = 1024  # tokens a sequence, over all ranks of its ring
    mask_documents: bool = True  # a token sees its own document only
    seed: int = 0  # of the order of documents, reshuffled every epoch

    @property
    def origin(self) -> str:
        """Where documents come from, as on the command line."""
        return f"data.source={self.source}" + (f" data.path={self.path}" if self.path else "")

    @property
    def held_out(self) -> "DataConfig | None":
        """The held-out text as a corpus of its own."""
        if self.eval_split is None and self.eval_path is None:
            return None
        path, split = self.eval_path or self.path, self.eval_split or DataConfig.split
        return replace(self, path=path, split=split, eval_path=None, eval_split=None, seed=0)  # the same text for every seed


@dataclass
class ParallelConfig:
    """How the ranks share the work: a mesh of data-parallel x ring x Ulysses ranks, parameters sharded over all."""

    ring: int | None = None  # ranks that share one sequence; None: all ranks
    ulysses: int | None = 1  # of these, how many exchange heads, so that the ring has fewer hops; None: the fastest by forecast
    layout: str = "auto"  # contiguous | zigzag | striped | auto: the least work for the busiest rank, at every step
    schedule: str = "auto"  # auto | state | kv
    kernel: str = "auto"  # auto | hopper | triton | blockwise | reference
    # recompute blocks in the backward, attention excepted; None: where a GPU's memory would else be short
    activation_checkpointing: bool | None = None
    timeout_s: int = 600  # of a collective, and of a hop unless RINGATTN_TIMEOUT is set


@dataclass
class OptimConfig:
    """AdamW, gradient clipping and the learning-rate schedule."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = 1.0  # global gradient norm; None: as it comes
    schedule: str = "cosine"  # cosine | wsd
    warmup_steps: int | None = None  # None: a tenth of the steps
    decay_fraction: float = 0.2  # wsd: the share of the steps, at the end, over which lr falls
    min_lr_ratio: float = 0.1


@dataclass
class TrainerConfig:
    """One run: how long, on what, and what it leaves behind."""

    steps: int = 300
    batch_size: int = 2  # sequences a data-parallel rank and micro-step
    accumulate: int = 1  # micro-steps an optimizer step
    seed: int = 0  # of the initial parameters
    device: str = "auto"  # auto | cpu | cuda
    precision: str = "auto"  # auto (bf16 on cuda, else fp32) | fp32 | bf16
    deterministic: bool = False  # the same bits in every run; slower: the backward of attention on Hopper by 1.4 to 1.5 times
    compile: bool | None = None  # fuse what lies around attention, and the loss, with torch.compile; None: on cuda
    checkpoint_every: int = 50  # steps; 0: only at the end
    keep_checkpoints: int = 2
    eval_every: int = 50  # steps between evaluations of held-out text (data.eval_split); 0: only at the end
    eval_tokens: int = 16_384  # of an evaluation at least, in whole sequences, always the same; fewer if there are not so many
    time_limit_s: float | None = None  # since the launch, after which the run ends with its step, or the next, and is saved
    # auto (the newest in this run's directory, if any) | never | the path of a checkpoint: of another run to begin from it, of
    # this one to go back to it
    resume: str = "auto"
    # the path of a checkpoint, or of a model in Hugging Face's format, with whose parameters a run begins, with steps,
    # optimizer and data of its own: to train on with longer sequences, or on other text
    init_from: str | None = None
    log_every: int = 1
    sample_tokens: int = 128  # generated at the end, and when a run that has ended is launched again; 0: none
    sample_prompt: str = "def "
    peak_tflops: float | None = None  # of one device, for MFU; None: known for the device, else MFU is left out


@dataclass
class LoggerConfig:
    """Where metrics go besides the console and metrics.jsonl."""

    # auto (the environment's WANDB_MODE, else online when logged in, else offline) | online | offline | off
    wandb: str = "auto"
    project: str | None = None  # None: the environment's WANDB_PROJECT, else ringattn


@dataclass
class Config:
    """A whole run. `name` is its directory under `outputs/`; the same name again resumes it."""

    name: str | None = None  # configs/train.yaml: the time of the launch
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


CHOICES = {
    "model.rope_scaling": ("llama3", "yarn"),
    "data.source": ("stdlib", "text", "jsonl", "parquet", "hub"),
    "parallel.layout": (*layout.KINDS, "auto"),
    "parallel.schedule": rank_plan.SCHEDULES,
    "parallel.kernel": (*dispatch.BACKENDS, *dispatch.DEPRECATED_BACKENDS),
    "optim.schedule": ("cosine", "wsd"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.precision": ("auto", "fp32", "bf16"),
    "logger.wandb": ("auto", "online", "offline", "off"),
}
AT_LEAST_ONE = (
    *("model.vocab_size", "model.layers", "model.dim", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn_dim"),
    *("model.rope_factor", "model.rope_trained_len", "model.window"),
    *("data.seq_len", "parallel.ring", "parallel.ulysses", "parallel.timeout_s"),
    *("trainer.steps", "trainer.batch_size", "trainer.accumulate"),
    *("trainer.keep_checkpoints", "trainer.eval_tokens", "trainer.log_every"),
)
SEEDS = ("data.seed", "trainer.seed")
AT_LEAST_ZERO = (
    *("optim.warmup_steps", "optim.weight_decay", "optim.min_lr_ratio", *SEEDS),
    *("trainer.checkpoint_every", "trainer.eval_every", "trainer.sample_tokens"),
)
POSITIVE = (
    *("model.rope_theta", "model.norm_eps", "optim.lr", "optim.eps", "optim.clip"),
    *("trainer.peak_tflops", "trainer.time_limit_s"),
)


def check(config: Config, world_size: int) -> None:
    """Refuse settings that make no sense by themselves or together, before anything is built.

    Args:
        world_size: how many ranks were launched.

    Raises:
        ConfigError: the first setting found wrong.
    """
    for name, allowed in CHOICES.items():
        value = attrgetter(name)(config)
        if value not in allowed:
            raise ConfigError(f"unknown {name}={value}: choose one of {', '.join(allowed)}")
    for names, bound, holds in (
        (AT_LEAST_ONE, "at least 1, and finite", lambda value: 1 <= value < math.inf),
        (AT_LEAST_ZERO, "at least 0", lambda value: value >= 0),
        (POSITIVE, "positive and finite", lambda value: 0 < value < math.inf),
        (SEEDS, "below 2**63", lambda value: value < 2**63),
    ):
        for name in names:
            value = attrgetter(name)(config)
            if value is not None and not holds(value):  # None stands for a default, NaN for nothing
                raise ConfigError(f"{name}={value} makes no sense: it must be {bound}")
    if config.trainer.init_from is not None and config.trainer.resume not in ("auto", "never"):
        raise ConfigError(
            f"trainer.init_from={config.trainer.init_from} and trainer.resume={config.trainer.resume} contradict each other: a "
            "run begins with the parameters of one checkpoint, or goes on from one"
        )
    if config.trainer.deterministic and config.parallel.kernel == "hopper":
        raise ConfigError(
            "trainer.deterministic=true and parallel.kernel=hopper contradict each other: those kernels sum gradients in no "
            "fixed order; use parallel.kernel=auto"
        )
    _check_unused(config)
    _check_data(config.data)
    _check_model(config.model)
    _check_ring(config, world_size)
    _check_optim(config.optim, config.trainer.steps)


def _check_unused(config: Config) -> None:
    """A setting that nothing would read is a misunderstanding."""
    trainer, logger = config.trainer, config.logger
    for name, is_used, needed in (
        ("trainer.eval_every", config.data.held_out, "held-out text: data.eval_split or data.eval_path"),
        ("trainer.eval_tokens", config.data.held_out, "held-out text: data.eval_split or data.eval_path"),
        ("trainer.sample_prompt", trainer.sample_tokens, "a sample: trainer.sample_tokens above 0"),
        ("logger.project", logger.wandb != "off", "Weights & Biases: logger.wandb other than off"),
    ):
        value = attrgetter(name)(config)
        if not is_used and value != attrgetter(name)(Config()):
            raise ConfigError(f"{name}={value} has no meaning without {needed}")


def _check_data(data: DataConfig) -> None:
    """What the source has no use for would train on something else than is meant."""
    for name in ("path", "eval_path"):
        if data.source == "stdlib" and (path := getattr(data, name)) is not None:
            raise ConfigError(
                f"data.{name}={path}, but data.source=stdlib reads no file: choose data=text, jsonl, parquet or hub"
            )
    if data.source != "hub" and data.subset is not None:
        raise ConfigError(
            f"data.subset={data.subset}, but only datasets of the hub have subsets: choose data=hub, or leave it out"
        )
    if data.source in ("stdlib", "text") and data.column != DataConfig.column:
        raise ConfigError(f"data.column={data.column}, but data.source={data.source} has no columns: leave it out")


def _check_model(model: ModelConfig) -> None:
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}: every key head serves "
            f"the same number of query heads; choose one of {_divisors(model.heads)}"
        )
    if model.head_dim is None and model.dim % model.heads:
        raise ConfigError(f"model.heads={model.heads} does not divide model.dim={model.dim}: set model.head_dim, or change one")
    for name in ("rope_trained_len", "rope_scaling"):
        if model.rope_factor is None and (value := getattr(model, name)) != getattr(ModelConfig, name):
            raise ConfigError(f"model.{name}={value} has no meaning without model.rope_factor: set both")
    if model.rope_factor is not None and model.rope_trained_len is None:
        raise ConfigError(
            f"model.rope_factor={model.rope_factor} slows features that turn seldom in the sequences that the model knew: set "
            "model.rope_trained_len to their tokens, too"
        )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        raise ConfigError(
            f"model.rope_theta={model.rope_theta} with model.rope_scaling=yarn, which asks where pairs of features turn slower "
            "than the ones before: set it above 1"
        )
    head_dim = model.resolved_head_dim
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"a head dim of {head_dim}: rotary embeddings turn pairs of features and the kernels hold at most {MAX_HEAD_DIM}, "
            f"so it must be even and at most {MAX_HEAD_DIM}; set model.head_dim, or change model.dim or model.heads"
        )


def _check_ring(config: Config, world_size: int) -> None:
    ring = config.parallel.ring or world_size
    if world_size % ring:
        raise ConfigError(
            f"parallel.ring={ring} does not divide the {world_size} ranks launched: ranks form a mesh of data-parallel "
            f"x ring; choose one of {_divisors(world_size)}, or launch another number of ranks"
        )
    if config.data.seq_len < ring:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is a sequence shorter than the ring of {ring} ranks, some of which "
            f"would hold no token: make it at least {ring}, or lower parallel.ring"
        )
    ulysses, heads = config.parallel.ulysses or 1, config.model.heads
    if ring % ulysses or heads % ulysses:
        raise ConfigError(
            f"parallel.ulysses={ulysses} must divide the {ring} ranks that share a sequence, and model.heads={heads}, which "
            f"they exchange: choose one of {_divisors(math.gcd(ring, heads))}"
        )


def _check_optim(optim: OptimConfig, steps: int) -> None:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={list(optim.betas)}: AdamW takes two numbers from 0 to below 1, such as [0.9,0.95]")
    if not 0 < optim.decay_fraction <= 1:
        raise ConfigError(f"optim.decay_fraction={optim.decay_fraction} is a share of the steps: above 0, at most 1")
    if optim.schedule != "wsd" and optim.decay_fraction != OptimConfig.decay_fraction:
        raise ConfigError(
            f"optim.decay_fraction={optim.decay_fraction}, but a {optim.schedule} schedule has no such phase: choose optim=wsd"
        )
    if not optim.min_lr_ratio <= 1:
        raise ConfigError(f"optim.min_lr_ratio={optim.min_lr_ratio} is a share of optim.lr: from 0 to 1")
    if (optim.warmup_steps or 0) > steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} exceeds trainer.steps={steps}, so that lr is never reached: "
            "lower it, or train longer"
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
