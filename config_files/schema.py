"""The configuration's schema: every key with its type, range and choices, and the rules that tie keys together.

Defaults and comments are not here: they stand in config_files/configure.yaml alone. Values may arrive typed (from a
checkpoint) or as text (a YAML scalar, a word of the command line); both are parsed to the type that the schema names.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

WHOLE_LIMIT = 2**31 - 1
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Allowed:
    """What a type accepts, in words: for error messages and --help."""

    text: str


# ------------------------------------------------------------------------------------------------- parsing of one value


def _parse_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text not in _BOOLEANS:
        raise ValueError("not a boolean")
    return _BOOLEANS[text]


def _parse_real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("not a number")
    return float(value)


def _parse_whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9][0-9_]*\s*", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    real = _parse_real(value)                                          # 1e5 means 100000
    if not real.is_integer():
        raise ValueError("not a whole number")
    return int(real)


def _parse_text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("not a printable text")
    return value


def _parse_optional(value: Any) -> Any:
    return None if isinstance(value, str) and value.strip().lower() in ("", "null", "~") else value


def _parse_list(value: Any) -> Any:
    if isinstance(value, str):
        inner = re.fullmatch(r"\s*\[(.*)\]\s*", value)
        return tuple(item.strip() for item in (inner[1] if inner else value).split(","))
    return tuple(value) if isinstance(value, list | tuple) else value


def _require(pattern: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"does not match {pattern}")
        return value

    return AfterValidator(check)


def _require_odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("even")
    return value


# ---------------------------------------------------------------------------------------------------------------- types

_Whole = BeforeValidator(_parse_whole)
_Real = BeforeValidator(_parse_real)
_Text = BeforeValidator(_parse_text)

Flag = Annotated[bool, BeforeValidator(_parse_boolean), Allowed("true or false")]
Count = Annotated[int, _Whole, Field(ge=1, le=WHOLE_LIMIT), Allowed("integer >= 1")]
Natural = Annotated[int, _Whole, Field(ge=0, le=WHOLE_LIMIT), Allowed("integer >= 0")]
SeedNumber = Annotated[int, _Whole, Field(ge=0, lt=2**32), Allowed("integer from 0 to 4294967295")]
Channels = Annotated[Literal[1, 3], _Whole]
ChunkSize = Annotated[Literal[16, 32, 64, 128, 256], _Whole]
ConvWidth = Annotated[Literal[2, 3, 4], _Whole]
KernelSize = Annotated[
    int, _Whole, Field(ge=1, le=WHOLE_LIMIT), AfterValidator(_require_odd), Allowed("odd integer >= 1")
]
Positive = Annotated[float, _Real, Field(gt=0, allow_inf_nan=False), Allowed("number > 0")]
NonNegative = Annotated[float, _Real, Field(ge=0, allow_inf_nan=False), Allowed("number >= 0")]
Probability = Annotated[float, _Real, Field(ge=0, le=1, allow_inf_nan=False), Allowed("number from 0 to 1")]
BelowOne = Annotated[float, _Real, Field(ge=0, lt=1, allow_inf_nan=False), Allowed("number >= 0 and < 1")]
OpenUnit = Annotated[float, _Real, Field(gt=0, lt=1, allow_inf_nan=False), Allowed("number > 0 and < 1")]
Text = Annotated[str, _Text, Allowed("text")]
EnvName = Annotated[str, _Text, _require(r"\S+"), Allowed("name of an environment, without blanks")]
Note = Annotated[str, _Text, _require(r"[\w.+=-]{1,64}"), Allowed("up to 64 letters, digits and . _ + = -")]
DeviceName = Annotated[str, _Text, _require(r"auto|cpu|cuda(:[0-9]{1,3})?"), Allowed("auto, cpu, cuda or cuda:N")]
OptionalPath = Annotated[Text | None, BeforeValidator(_parse_optional), Allowed("path or null")]
Multiples = Annotated[
    tuple[Count, ...], BeforeValidator(_parse_list), Field(min_length=1), Allowed("list of integers >= 1")
]
ImageShape = Annotated[
    tuple[Count, Count, Count], BeforeValidator(_parse_list), Allowed("list [channels, height, width] of integers >= 1")
]
Activation = Literal["SiLU", "ReLU", "GELU", "ELU"]
OptimiserName = Literal["Laprop", "Adam"]
NormName = Literal["batch", "rms", "layer", "none"]


class Section(BaseModel):
    """A group of keys: frozen, every key required, no other key accepted."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ------------------------------------------------------------------------------------------------------------- sections


class BasicSettings(Section):
    Env_name: EnvName
    Seed: SeedNumber
    Device: DeviceName
    ImageSize: Count
    ImageChannel: Channels
    ReplayBufferOnGPU: Flag
    Use_amp: Flag
    Use_cg: Flag
    Compile: Flag
    Kernels: Literal["auto", "cuda", "triton", "cpu", "reference"]
    Deterministic: Flag
    SavePath: OptionalPath
    RunDir: Text


class Evaluate(Section):
    EpisodeNum: Count
    NumEnvs: Count
    DuringTraining: Flag
    EverySteps: Count
    Greedy: Flag
    SaveVideo: Flag


class JointTrainAgent(Section):
    SampleMaxSteps: Count
    BufferMaxLength: Count
    WorldModelWarmUp: Count
    BehaviourWarmUp: Count
    NumEnvs: Count
    BatchSize: Count
    BatchLength: Annotated[int, _Whole, Field(ge=2, le=WHOLE_LIMIT), Allowed("integer >= 2")]
    ImagineBatchSize: Count
    ImagineContextLength: Count
    ImagineBatchLength: Count
    RealityContextLength: Natural
    ActOn: Literal["prior", "posterior"]
    TrainDynamicsEverySteps: Count
    TrainDynamicsEpoch: Count
    TrainAgentEverySteps: Count
    FreezeWorldModelAfterSteps: Natural
    FreezeBehaviourAfterSteps: Natural
    SaveEverySteps: Count
    SaveModels: Flag
    LogEverySteps: Count
    MaxBadUpdates: Count
    Sampling: Literal["dynamic", "uniform"]
    Tau: Positive
    ImaginationTau: Positive
    Alpha: NonNegative
    Beta: NonNegative
    MaskEpisodeStart: Flag
    MaskAfterTermination: Flag
    ResetStateAtEpisodeStart: Flag
    OverlapEnvironment: Flag


class Optimiser(Section):
    LearningRate: Positive
    Epsilon: Positive


class Encoder(Section):
    Depth: Count
    Mults: Multiples
    Norm: NormName
    Kernel: KernelSize
    Padding: Literal["same"]
    FirstStrideOne: Flag
    InputSize: ImageShape


class Decoder(Encoder):
    FinalLayerSigmoid: Flag


class Head(Section):
    HiddenUnits: Count
    LayerNum: Count


class Transformer(Section):
    NumLayers: Count
    NumHeads: Count


class StateSpace(Section):
    d_state: Annotated[int, _Whole, Field(ge=1, le=256), Allowed("integer from 1 to 256")]
    d_conv: ConvWidth
    expand: Count
    headdim: Count
    ngroups: Count
    chunk_size: ChunkSize


class Mamba(Section):
    n_layer: Count
    d_intermediate: Natural
    ssm_cfg: StateSpace


class WorldModel(Section):
    Backbone: Literal["Mamba", "Mamba2", "Transformer"]
    InChannels: Channels
    Act: Activation
    CategoricalDim: Count
    ClassDim: Annotated[int, _Whole, Field(ge=2, le=WHOLE_LIMIT), Allowed("integer >= 2")]
    HiddenStateDim: Count
    Optimiser: OptimiserName
    Max_grad_norm: Positive
    Warmup_steps: Natural
    Dropout: BelowOne
    Unimix_ratio: BelowOne
    Weight_decay: NonNegative
    FreeBits: NonNegative
    DynamicsCoef: NonNegative
    RepresentationCoef: NonNegative
    Adam: Optimiser
    Laprop: Optimiser
    Encoder: Encoder
    Decoder: Decoder
    Reward: Head
    Termination: Head
    Transformer: Transformer
    Mamba: Mamba


class Hidden(Section):
    HiddenUnits: Count


class ActorCritic(Section):
    NumLayers: Count
    Gamma: Probability
    Lambda: Probability
    EntropyCoef: NonNegative
    Max_grad_norm: Positive
    Warmup_steps: Natural
    Act: Activation
    Optimiser: OptimiserName
    Adam: Optimiser
    Laprop: Optimiser
    Actor: Hidden
    Critic: Hidden


class ProximalPolicy(ActorCritic):
    EpsilonClip: OpenUnit
    K_epochs: Count
    Minibatch: Count
    CriticCoef: NonNegative
    KL_threshold: Positive


class Agent(Section):
    Policy: Literal["AC", "PPO"]
    Unimix_ratio: BelowOne
    AC: ActorCritic
    PPO: ProximalPolicy


class Models(Section):
    WorldModel: WorldModel
    Agent: Agent


class Init(Section):
    Mode: Literal["online", "offline", "disabled"]
    Project: Text


class Wandb(Section):
    Init: Init


class Atari(Section):
    FrameSkip: Count
    RepeatActionProbability: Probability
    NoopMax: Natural


class Toy(Section):
    RecallDelay: Natural
    RecallVaries: Flag


class Env(Section):
    Atari: Atari
    Toy: Toy
    WorkerRestarts: Natural
    WorkerTimeout: Positive


class Config(Section):
    """The whole configuration. Building one checks every key and every rule below."""

    BasicSettings: BasicSettings
    Evaluate: Evaluate
    JointTrainAgent: JointTrainAgent
    Models: Models
    Wandb: Wandb
    n: Note
    Env: Env

    @model_validator(mode="after")
    def _check_rules(self) -> "Config":
        for rule in (_image_faults, _sequence_model_faults, _replay_faults, _context_faults, _device_faults):
            for fault in rule(self):
                raise ValueError(fault)
        return self


# --------------------------------------------------------------------------------- rules that tie several keys together


def _image_faults(config: Config) -> Iterator[str]:
    basic, world_model = config.BasicSettings, config.Models.WorldModel
    if world_model.InChannels != basic.ImageChannel:
        yield (
            f"Models.WorldModel.InChannels = {world_model.InChannels}: must equal "
            f"BasicSettings.ImageChannel = {basic.ImageChannel}"
        )
    image = (basic.ImageChannel, basic.ImageSize, basic.ImageSize)
    for name in ("Encoder", "Decoder"):
        part = getattr(world_model, name)
        if part.InputSize != image:
            yield (
                f"Models.WorldModel.{name}.InputSize = {list(part.InputSize)}: must be {list(image)}, as "
                f"BasicSettings.ImageChannel = {basic.ImageChannel} and ImageSize = {basic.ImageSize} say"
            )
        halvings = len(part.Mults) - part.FirstStrideOne
        if basic.ImageSize % 2**halvings:
            yield (
                f"BasicSettings.ImageSize = {basic.ImageSize}: must be a multiple of {2**halvings}, "
                f"since the {len(part.Mults)} layers of Models.WorldModel.{name}.Mults halve it {halvings} times"
            )


def _sequence_model_faults(config: Config) -> Iterator[str]:
    world_model = config.Models.WorldModel
    width, ssm = world_model.HiddenStateDim, world_model.Mamba.ssm_cfg
    prefix = "Models.WorldModel.Mamba.ssm_cfg"
    if world_model.Backbone == "Mamba2":
        inner = width * ssm.expand
        if inner % ssm.headdim:
            yield (
                f"{prefix}.headdim = {ssm.headdim}: must divide "
                f"expand * HiddenStateDim = {ssm.expand} * {width} = {inner}"
            )
        elif (inner // ssm.headdim) % ssm.ngroups:
            yield f"{prefix}.ngroups = {ssm.ngroups}: must divide the {inner // ssm.headdim} heads ({inner} / headdim)"
    if world_model.Backbone == "Transformer":
        heads, train = world_model.Transformer.NumHeads, config.JointTrainAgent
        if width % heads:
            yield f"Models.WorldModel.Transformer.NumHeads = {heads}: must divide HiddenStateDim = {width}"
        longest = max(train.RealityContextLength, train.ImagineContextLength + train.ImagineBatchLength)
        if longest > train.BatchLength:
            yield (
                f"JointTrainAgent.BatchLength = {train.BatchLength}: the Transformer knows this many positions, but "
                f"RealityContextLength or ImagineContextLength + ImagineBatchLength asks for {longest}"
            )


def _replay_faults(config: Config) -> Iterator[str]:
    train = config.JointTrainAgent
    capacity = train.BufferMaxLength // train.NumEnvs * train.NumEnvs
    for warm_up, wanted, sequences, length in (
        ("WorldModelWarmUp", f"BatchSize = {train.BatchSize}", train.BatchSize, "BatchLength"),
        ("BehaviourWarmUp", "any number of", 1, "ImagineContextLength"),   # contexts are drawn with replacement
    ):
        rows, rows_each = getattr(train, warm_up), getattr(train, length)
        starts = (rows // train.NumEnvs - rows_each + 1) * train.NumEnvs   # rows that can open a sequence
        if starts < sequences:
            enough = (-(-sequences // train.NumEnvs) + rows_each - 1) * train.NumEnvs
            yield (
                f"JointTrainAgent.{warm_up} = {rows}: too few rows for {wanted} sequences of "
                f"{length} = {rows_each} rows, from NumEnvs = {train.NumEnvs} environment(s); {enough} are enough"
            )
        if rows > capacity:
            yield (
                f"JointTrainAgent.BufferMaxLength = {train.BufferMaxLength}: never holds the {warm_up} = {rows} rows "
                f"that training waits for (NumEnvs = {train.NumEnvs})"
            )


def _context_faults(config: Config) -> Iterator[str]:
    train, agent = config.JointTrainAgent, config.Models.Agent
    capacity = train.BufferMaxLength // train.NumEnvs
    if train.RealityContextLength > capacity:
        yield (
            f"JointTrainAgent.RealityContextLength = {train.RealityContextLength}: longer than the {capacity} rows "
            f"that BufferMaxLength keeps for each environment"
        )
    env_name = config.BasicSettings.Env_name
    if agent.Unimix_ratio > 0 and is_continuous(env_name):
        yield (
            f"Models.Agent.Unimix_ratio = {agent.Unimix_ratio}: discrete actions only, must be 0 for the continuous "
            f"BasicSettings.Env_name = {env_name}"
        )


def _device_faults(config: Config) -> Iterator[str]:
    basic = config.BasicSettings
    on_cuda = basic.Device.startswith("cuda")
    if (basic.Kernels in ("cuda", "triton") and basic.Device == "cpu") or (basic.Kernels == "cpu" and on_cuda):
        yield f"BasicSettings.Kernels = {basic.Kernels}: does not run on BasicSettings.Device = {basic.Device}"


def is_continuous(env_name: str) -> bool:
    """Whether the name alone says that actions are continuous; other environments tell once they are made."""
    return re.match(r"dmc[/_]|dm_|Toy/Reach-", env_name) is not None


# --------------------------------------------------------------------------------------------- what the schema contains


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section class that a field holds; None for a key."""
    return field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, Section) else None


def walk_keys(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key below `section` as (dotted name, field), in the schema's order."""
    for name, field in section.model_fields.items():
        inner = section_of(field)
        if inner is None:
            yield prefix + name, field
        else:
            yield from walk_keys(inner, f"{prefix}{name}.")


def describe(field: FieldInfo) -> str:
    """What a key accepts, in words: 'integer >= 1', 'AC or PPO'."""
    for item in field.metadata:
        if isinstance(item, Allowed):
            return item.text
    assert get_origin(field.annotation) is Literal, f"a type without Allowed(...): {field}"
    *most, last = map(str, get_args(field.annotation))
    return f"{', '.join(most)} or {last}" if most else last
