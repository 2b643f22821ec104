"""The table of flags of `paceline serve`, in groups, with lookups by name, environment variable and file key."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from paceline.media import MAX_ATTACHMENTS
from paceline.params import flag_help
from paceline.sampling_table import PARAMETERS, SAMPLER_LETTERS, Parameter
from paceline.scheduling.strategies import check_strategy_name
from paceline.server.flags import readers as read
from paceline.server.flags import setters
from paceline.server.flags.readers import UNSET, Reader
from paceline.server.flags.setters import Setter
from paceline.speculation.named_drafter import check_drafter_name

ENV_PREFIX: Final = "PACELINE_"
_ARG_PREFIX: Final = "LLAMA_ARG_"
SWITCH: Final = ""  # the metavar of a flag that takes no value


@dataclass(frozen=True, slots=True)
class Store:
    """Store the value in the settings.

    Attributes:
        into: Targets, separated by spaces, for example "engine.n_ctx" or "server.port".
        setter: Stores the value, if putting it into the targets is not enough.
        convert: Called with the value first.
    """

    into: str
    setter: Setter | None = None
    convert: Callable[[Any], Any] | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets."""
        return tuple(self.into.split())


@dataclass(frozen=True, slots=True)
class Ignore:
    """Start without it; a printed note says why nothing is lost."""

    why: str


@dataclass(frozen=True, slots=True)
class NoOp:
    """Do nothing, without a note: the flag asks for the usual behaviour."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not start. way_out: a sentence with the alternative."""

    way_out: str


@dataclass(frozen=True, slots=True)
class Print:
    """Print something in place of serving."""

    what: Literal["help", "version", "config"]


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Read more flags from the file that the value names."""


Action = Store | Ignore | NoOp | Reject | Print | ReadConfig
NO_OP: Final = NoOp()


@dataclass(frozen=True, slots=True)
class Flag:
    """One row of the table.

    spelled: its names, apart by spaces, the short ones first. metavar: its value's name; `SWITCH` for none. reader: from text
    to value. arg: llama-server's environment variable, without LLAMA_ARG_. variable: one without this prefix. off: names that
    mean False. many: may be repeated and adds up; its reader returns a tuple. actions: other actions for certain values.
    default: the value without the flag, if the dataclasses do not have it. secret: its value is never shown. ours: llama-
    server does not have it. table: in a file its value may be a table, which its reader gets as JSON.
    """

    spelled: str
    metavar: str
    reader: Reader
    action: Action
    text: str
    arg: str = ""
    variable: str | None = None
    off: str = ""
    many: bool = False
    actions: Mapping[Any, Action] = field(default_factory=dict)
    default: str = ""
    secret: bool = False
    ours: bool = False
    table: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names that take a value or mean True."""
        return tuple(self.spelled.split())

    @property
    def off_names(self) -> tuple[str, ...]:
        """The names that mean False."""
        return tuple(self.off.split())

    @property
    def long_name(self) -> str:
        """The name that files, PACELINE_ variables and messages use: the first long one."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def env(self) -> str | None:
        """llama-server's environment variable."""
        return f"{_ARG_PREFIX}{self.arg}" if self.arg else self.variable

    @property
    def own_envs(self) -> tuple[str, ...]:
        """The environment variables made of the long names; none for a flag that only prints."""
        if isinstance(self.action, Print):
            return ()
        long_names = [name for name in self.names if name.startswith("--")]
        return tuple(ENV_PREFIX + re.sub("[-.]", "_", name[2:]).upper() for name in long_names)

    @property
    def off_env(self) -> str | None:
        """llama-server's variable that means False by being set, whatever its value."""
        return f"{_ARG_PREFIX}NO_{self.arg}" if self.arg and self.off else None

    def action_of(self, value: Any) -> Action:
        """Return the action for this value."""
        return self.actions.get(value, self.action) if self.actions else self.action


NO_LIMIT: Final = sys.maxsize


def _without_repeats(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _value(
    spelled: str, action: Reject | Ignore, text: str, *, arg: str = "", metavar: str = "N", **facts: Any
) -> Flag:
    return Flag(spelled, metavar, read.unread, action, text, arg, **facts)


def _switch(spelled: str, action: Action, text: str, **facts: Any) -> Flag:
    if isinstance(action, Reject | Ignore):
        facts = {"actions": {False: NO_OP}, **facts}
    return Flag(spelled, SWITCH, read.switch, action, text, **facts)


def _size(name: str, low: int, high: int | None, text: str, kind: str) -> Flag:
    """Return the flag of a size of a kind of drafts of llama-server."""
    defaults = dict(setters.SPEC_TYPES[kind].sizes.values())
    reader = read.integer(low) if high is None else read.integer(low, high)
    into = Store(f"aside.{name.replace('-', '_')}")
    return Flag(f"--spec-{name}", "N", reader, into, f"{text}, with --spec-type {kind}.", default=str(defaults[name]))


_INTEGER = read.integer(-(2**31))
_PARAMETERS: Final[Mapping[str, tuple[Reader, Setter | None, Callable[[Any], Any] | None]]] = {
    "max_tokens": (read.integer(-2), None, lambda count: None if count < 0 else count),
    "stop": (read.one_text, None, None),
    "temperature": (read.number(), setters.temperature, None),
    "top_k": (_INTEGER, None, lambda k: max(k, 0)),
    "seed": (read.integer(-1, 2**64 - 1), None, lambda seed: None if seed in (-1, 2**32 - 1) else seed),
    "samplers": (read.sampler_names, None, None),
    "logit_bias": (read.bias, None, dict),
    "dry_base": (read.number(1), None, None),
    "dry_sequence_breakers": (read.one_text, setters.sequence_breakers, None),
    "json_schema": (read.some_text, setters.instead_of("sampling.grammar", "sampling.json_schema"), None),
    "grammar": (read.some_text, setters.instead_of("sampling.json_schema", "sampling.grammar"), None),
}
"""Reader, setter and conversion of sampling parameters whose texts mean more than their values."""

_READERS: Final[Mapping[str, Reader]] = {"number": read.number(), "integer": _INTEGER, "boolean": read.switch}
_PARAMETER_DEFAULTS: Final = {"stop": "none", "logit_bias": "none", "disable_any_whitespace": "off"}


def _flags_of(row: Parameter) -> Iterator[Flag]:
    """Yield the flag of a sampling parameter, and the flag that reads its value from a file, if there is one."""
    into, default = f"sampling.{row.name}", _PARAMETER_DEFAULTS.get(row.name, "")
    metavar = SWITCH if row.kind == "boolean" else row.metavar or "N"
    reader, setter, convert = _PARAMETERS[row.name] if row.name in _PARAMETERS else (_READERS[row.kind], None, None)
    yield Flag(
        row.flags, metavar, reader, Store(into, setter, convert), flag_help(row.name), variable=row.env, many=row.is_repeated,
        default=default, ours=row.ours,
    )  # fmt: skip
    if row.file_flags and setter is not None:
        about = f"The same, with the {'schema' if row.kind == 'json' else row.name} in a file."
        yield Flag(row.file_flags, "FILE", read.path, Store(into, setters.of_file(setter)), about)


_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
_MODELS_OWN = "the model's"
_LOG_LEVELS = ("error", "error", "warning", "info", "debug")  # by llama-server's numbers
_LINES = "every line of the log begins with its time and its level"
_LOAD_MODES = {
    "auto": "auto",
    "none": "none",
    "mmap": "mmap",
    "mlock": "mlock",
    "mmap+mlock": "mmap_mlock",
    "dio": "direct_io",
}
_PLACED = Ignore("threads are placed by the operating system; start the server under taskset or numactl to choose")
_STEERING = Reject("control vectors are not supported yet; leave it out")
_HUB = Reject("this shortcut is not supported; name the repository of the model with -hf")
_DOCKER = Reject("Docker Hub is not supported; name a repository of the Hugging Face Hub with -hf")
SPECULATION: Final = Reject(
    f"drafts are made otherwise here; leave it out, or give --spec-type {', '.join(setters.SPEC_TYPES)}"
)
_OWN_NGRAMS = Reject(
    "n-grams are looked up in a request's own tokens here; leave it out, or give --spec-type ngram-simple"
)
_REMOVED = Reject("llama-server has removed it; give --spec-draft-n-max, or the sizes of a --spec-type")
_NO_VIDEO = Ignore("it is about video, which is not supported yet")
_TOOLS = Reject("the server runs no tools; let the client run them")
_NO_PAGES = Ignore("the web page keeps its settings in the browser")
_DRAFT_THREADS = (  # how threads of a draft model are placed
    "--spec-draft-cpu-mask -Cd --cpu-mask-draft",
    "--spec-draft-cpu-range -Crd --cpu-range-draft",
    "--spec-draft-cpu-strict --cpu-strict-draft",
    "--spec-draft-prio --prio-draft",
    "--spec-draft-poll --poll-draft",
    "--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft",
    "--spec-draft-cpu-strict-batch --cpu-strict-batch-draft",
    "--spec-draft-prio-batch --prio-batch-draft",
    "--spec-draft-poll-batch --poll-batch-draft",
)
_DRAFTS = (  # names and environment variable of what takes a value
    ("--spec-synth-len", "SPEC_SYNTH_LEN"),
    ("--spec-synth-rates", "SPEC_SYNTH_RATES"),
    ("--spec-draft-p-split --draft-p-split", "SPEC_DRAFT_P_SPLIT"),
    *((f"--spec-ngram-map-k4v-{name}", "") for name in ("size-n", "size-m", "min-hits")),
)
_SHARED_NGRAMS = (
    *((f"--spec-ngram-mod-n-{name}", "N") for name in ("match", "max", "min")),
    ("-lcs --lookup-cache-static", "FILE"),
    ("-lcd --lookup-cache-dynamic", "FILE"),
)
_REMOVED_NAMES = (
    ("--draft --draft-n --draft-max", "DRAFT_MAX"),
    ("--draft-min --draft-n-min", "DRAFT_MIN"),
    *((f"--spec-ngram-{name}", "") for name in ("size-n", "size-m", "min-hits")),
)

# The table is laid out by hand, a few lines a row.
# fmt: off
GROUPS: Final[dict[str, tuple[Flag, ...]]] = {
    "Model and memory": (
        Flag("-m --model", "MODEL", read.model, Store("server.model", setters.model), "GGUF file, of a split set "
             "its first part; or a name: hf:USER/REPO[:QUANT], a URL, ollama:NAME. With -mu: where its file goes.", arg="MODEL",
             default="the demo model"),
        Flag("-c --ctx-size", "N", read.integer(0), Store("engine.n_ctx", setters.context_size),
             "KV cells, in tokens. All slots share them, and one may use them all. 0: as many as the model was trained with.",
             arg="CTX_SIZE", default="4096 times the slots, or what the model was trained with if that is more and takes at "
             "most a quarter of the free memory; less where memory is short"),
        Flag("-np --parallel", "N", read.integer(-(2**31)), Store("engine.num_slots", setters.slots),
             "Slots: sequences that run at once. -1: automatic.", arg="N_PARALLEL"),
        Flag("--kv-unified-per-slot", "N", read.integer(1), Store("aside.cells_per_slot"), "Without -c: the KV cells are this "
             "many times the slots. A single sequence may use more of them.", arg="KV_UNIFIED_PER_SLOT", default="not used"),
        Flag("-b --batch-size", "N", read.integer(1), Store("engine.n_batch"), "Most tokens of a tick.", arg="BATCH",
             default="2048"),
        Flag("-ub --ubatch-size", "N", read.integer(1), Store("engine.n_ubatch"), "Most tokens computed at once.", arg="UBATCH",
             default="512"),
        Flag("-ngl --gpu-layers --n-gpu-layers", "N", read.layers, Store("engine.n_gpu_layers"),
             "Layers on the GPU: a number, auto or all.", arg="N_GPU_LAYERS", default="as many as fit"),
        Flag("-dev --device", "NAME,...", read.some_items,
             Store("engine.devices", convert=lambda names: ["CPU"] if names == ("none",) else list(names)),
             "Compute on these devices, see `paceline info`; none: on the CPU alone.", arg="DEVICE", default="all", many=True),
        Flag("--rpc", "HOST:PORT,...", read.some_items, Store("engine.rpc", convert=list), "Compute on the devices of these "
             "hosts as well, where `paceline rpc-serve` runs.", arg="RPC", default="none", many=True),
        Flag("--rpc-timeout", "S", read.number(), Store("engine.rpc_timeout_s"),
             "Seconds for which such a host may be silent while it is waited for, so for a pass of the model at least, until "
             "it counts as lost. Requests wait as long until it is back, but at most 30.", ours=True),
        Flag("-sm --split-mode", "MODE", read.one_of(("none", "layer", "row", "tensor")), Store("engine.split_mode"),
             "How several GPUs share the model: none, layer, row or tensor.", arg="SPLIT_MODE", default="layer"),
        Flag("-ts --tensor-split", "N,...", read.shares, Store("engine.tensor_split"), "Share of each GPU, as proportions.",
             arg="TENSOR_SPLIT", default="by free memory", many=True),
        Flag("-mg --main-gpu", "INDEX", read.integer(0), Store("engine.main_gpu"),
             "The GPU of -sm none, and of small tensors with -sm row.", arg="MAIN_GPU", default="0"),
        Flag("-ot --override-tensor", "PATTERN=TYPE,...", read.placements, Store("engine.tensor_overrides", convert=dict),
             "The type of buffer of tensors whose names match a pattern, as in _exps=CPU; the first match counts.",
             arg="OVERRIDE_TENSOR", default="none", many=True),
        _switch("-cmoe --cpu-moe", Store("engine.cpu_moe"), "Keep the experts of a mixture in host memory.", arg="CPU_MOE",
                default="off"),
        Flag("-ncmoe --n-cpu-moe", "N", read.integer(0, 512), Store("engine.n_cpu_moe"),
             "The same for the experts of the first N layers.", arg="N_CPU_MOE", default="0"),
        Flag("-ncffn --n-cpu-ffn", "N", read.integer(0, 512), Store("engine.n_cpu_ffn"),
             "Keep the dense feed-forward weights of the first N layers in host memory.", arg="N_CPU_FFN", default="0"),
        Flag("-fit --fit", "on|off", read.switch, Store("engine.fit"), "Where memory may be short, plan it before the model "
             "is loaded: choose -c, -np and -ngl so that it fits, as far as they are not given, and refuse what cannot fit.",
             arg="FIT"),
        Flag("-fitt --fit-target", "MIB,...", read.mebibytes, Store("engine.fit_target_bytes"),
             "Memory that --fit leaves free, in MiB: of each GPU, or a list for each; of host memory without a GPU.",
             arg="FIT_TARGET", default="1024 of a GPU; an eighth of free host memory, at most 1024", many=True),
        Flag("-fitc --fit-ctx", "N", read.integer(1), Store("engine.fit_ctx"), "Least context that --fit chooses.",
             arg="FIT_CTX", default="512"),
        Flag("--fit-cache", "MIB", read.integer(0, 2**40), Store("engine.fit_cache_bytes", convert=lambda mib: mib << 20),
             "Without -c: most memory of the KV cache, in MiB, beyond 4096 tokens a slot.", ours=True,
             default="a quarter of the free memory"),
        Flag("-fa --flash-attn", "on|off|auto", read.on_off_auto, Store("engine.flash_attn"), "Flash attention.",
             arg="FLASH_ATTN", default="auto"),
        Flag("-ctk --cache-type-k", "TYPE", read.one_of(_CACHE_TYPES), Store("engine.type_k"),
             f"Type of the keys in the cache: {', '.join(_CACHE_TYPES)}.", arg="CACHE_TYPE_K", default="f16"),
        Flag("-ctv --cache-type-v", "TYPE", read.one_of(_CACHE_TYPES), Store("engine.type_v"),
             "Type of the values in the cache, as for -ctk.", arg="CACHE_TYPE_V", default="f16"),
        Flag("-t --threads", "N", read.automatic_below(1, 512), Store("engine.n_threads"), "CPU threads. 0 or less: automatic.",
             arg="THREADS", default="physical cores, fewer for small models"),
        Flag("-tb --threads-batch", "N", read.automatic_below(1, 512), Store("engine.n_threads_batch"),
             "CPU threads where a tick has more than single tokens. 0 or less: automatic.", default="as --threads"),
        Flag("--lora", "FILE,...", read.unscaled_paths,
             Store("engine.lora server.lora_scales", setters.adapters("aside.adapters")), "LoRA adapters, applied with scale 1 "
             "where a request does not say. An adapter's name is its file's, without ending.", default="none", many=True),
        Flag("--lora-scaled",
             "FILE:SCALE,...", read.scaled_paths, Store("engine.lora server.lora_scales", setters.adapters("aside.adapters")),
             "LoRA adapters with the scales that apply where a request does not say.", default="none", many=True),
        Flag("--lora-modules", "NAME=FILE,...", read.named_paths,
             Store("engine.lora", setters.adapters("aside.named_adapters")), "LoRA adapters by name, as in vLLM: they apply "
             "where a request gives the name as its model.", default="none", many=True, ours=True),
        _switch("--enable-lora-loading", Store("server.lora_loading"), "POST /v1/load_lora_adapter and "
                "/v1/unload_lora_adapter: clients may have any file of this machine read.", default="off", ours=True),
        _switch("--lora-init-without-apply", Store("aside.unapplied"),
                "Load the adapters, and apply them only where a request says so.", default="off"),
        Flag("--override-kv", "KEY=TYPE:VALUE,...", read.metadata, Store("engine.kv_overrides", convert=dict),
             "Metadata in place of the file's; types: int, float, bool, str.", default="none", many=True),
        Flag("-cram --cache-ram", "MIB", read.integer(-1), Store("engine.host_cache_bytes",
             convert=lambda mib: NO_LIMIT if mib < 0 else mib << 20), "Host memory for the prefixes of ended requests, in MiB. "
             "-1: no limit, 0: none.", arg="CACHE_RAM", default="an eighth of the machine's memory"),
        Flag("--host-cache-bytes", "N", read.integer(0, 2**63 - 1), Store("engine.host_cache_bytes"), "The same in bytes.",
             default="an eighth of the machine's memory", ours=True),
        Flag("--disk-cache", "FOLDER", read.text, Store("engine.disk_cache"), "Folder in which prefixes survive a restart, "
             "shared by servers; auto: paceline/kv in the user's cache folder.", default="auto", ours=True),
        _switch("--no-disk-cache", Store("engine.disk_cache", convert=lambda on: None if on else UNSET),
                "Keep prefixes in memory alone.", default="off", ours=True),
        Flag("--disk-cache-bytes", "N", read.integer(1, 2**63 - 1), Store("engine.disk_cache_bytes"), "Most bytes of this "
             "folder, of all models.", default="a tenth of the free space, at most 16 GiB", ours=True),
        _switch("--cache-prompt", Store("engine.cache_prompt"), "Share prefixes between requests and keep them.",
                arg="CACHE_PROMPT", off="--no-cache-prompt"),
        _switch("--swa-full", Store("engine.swa_full"), "Cache whole sequences in sliding-window layers too: costs memory, and "
                "any part of a prefix is shared.", arg="SWA_FULL", default="off"),
        Flag("--rope-scaling", "TYPE", read.one_of(("none", "linear", "yarn")), Store("engine.rope_scaling"),
             "How positions are stretched: none, linear or yarn.", arg="ROPE_SCALING_TYPE", default=_MODELS_OWN),
        Flag("--rope-scale", "N", read.number(above=0), Store("engine.rope_freq_scale", convert=lambda factor: 1 / factor),
             "Stretches the context by this factor.", arg="ROPE_SCALE", default=_MODELS_OWN),
        Flag("--rope-freq-base", "N", read.number(above=0), Store("engine.rope_freq_base"), "Base frequency of RoPE.",
             arg="ROPE_FREQ_BASE", default=_MODELS_OWN),
        Flag("--rope-freq-scale", "N", read.number(above=0), Store("engine.rope_freq_scale"), "Stretches the context by 1/N.",
             arg="ROPE_FREQ_SCALE", default=_MODELS_OWN),
        Flag("--yarn-orig-ctx", "N", read.automatic_below(1), Store("engine.yarn_orig_ctx"), "YaRN: the context that the model "
             "was trained with. 0: as its file says.", arg="YARN_ORIG_CTX", default=_MODELS_OWN),
        *(
            Flag(f"--yarn-{name}", "N", read.negative_is_automatic, Store(f"engine.yarn_{name.replace('-', '_')}"),
                 f"YaRN: {text}. -1: as the model says.", arg=f"YARN_{name.replace('-', '_').upper()}",
                 default=_MODELS_OWN)
            for name, text in (
                ("ext-factor", "how far to extrapolate, 0 is not at all"),
                ("attn-factor", "scale of the attention"),
                ("beta-slow", "correction of the low frequencies"),
                ("beta-fast", "correction of the high frequencies"),
            )
        ),
        _switch("-kvu --kv-unified", NO_OP,
                "One pool of KV cells for all slots, which is always so here.", arg="KV_UNIFIED", off="-no-kvu --no-kv-unified",
                actions={False: Ignore("slots always share one pool of KV cells; a sequence may use more than its part")}),
        _switch("--context-shift", Reject("moving the context on is not built, as it changes what the model sees; "
                "a request ends with finish reason length when the context is full: set -c to what you need"),
                "Throw away old tokens when the context is full.", arg="CONTEXT_SHIFT", off="--no-context-shift"),
        Flag("--keep", "N", read.integer(-1), Ignore("it means something with --context-shift alone"), "Of --context-shift."),
    ),
    "Engine": (
        Flag("--strategy", "NAME", read.name_or_table, Store("engine.strategy", setters.named("strategy", check_strategy_name)),
             "What goes into a tick: paced, decode_maximal, prefill_priority, balanced, or module:attr. Options follow the "
             "name, as in paced:patience=4,stretch=1.5; in a file also as a table with the key name.", table=True, ours=True),
        Flag("--itl-target-ms", "MS", read.number(), Store("engine.itl_target_ms"), "Time between two tokens of a stream that "
             "the strategy paced aims at.", default="250 on a CPU, 50 on a GPU", ours=True),
        Flag("--max-tick-ms", "MS", read.number(), Store("engine.max_tick_ms"),
             "Longest tick of the strategy paced while no sequence decodes.", ours=True),
        Flag("--chunk-size", "N", read.integer(), Store("engine.chunk_size"), "Most prompt tokens of one sequence in a tick.",
             ours=True),
        Flag("--max-queue", "N", read.integer(), Store("engine.max_queue"),
             "Requests that may be open beyond one for each slot; further ones get a 429.", ours=True),
        Flag("--max-queue-tokens", "N", read.integer(), Store("engine.max_queue_tokens"),
             "Prompt tokens that may wait; further requests get a 429.", default="no limit", ours=True),
        Flag("--isolation", "process|thread", read.text, Store("engine.isolation"), "Where the engine computes: a process of "
             "its own, which may die without the server, or a thread of the server.", default="process", ours=True),
        Flag("--on-engine-death", "replay|fail", read.text, Store("engine.on_engine_death"), "What happens to requests after a "
             "crash of the worker process: a new one continues them, or they fail.", default="replay", ours=True),
        Flag("--max-restarts", "N", read.integer(), Store("engine.max_restarts"),
             "Restarts in a row of an engine's process that crashes; at one crash more the server ends with exit status 70, "
             "for its service manager to act on. A process that ran for a minute ends the row.", default="no limit", ours=True),
        Flag("--hang-timeout", "S", read.seconds("never", math.inf, 86400), Store("engine.hang_timeout_s"),
             "Seconds for which the heartbeats of an engine's process may stop, at least 3: then it is killed, and requests go "
             "on as --on-engine-death has it. A pass may take 20 times as long as expected. -1: never.", ours=True),
        Flag("--instrument", "MODULE:ATTR", read.instruments, Store("engine.instruments"),
             "An Instrument that observes the engine: an object, or a class, which is instantiated in the engine's process.",
             many=True, default="none", ours=True),
        Flag("--trace", "FILE", read.path, Store("engine.trace", setters.in_folder("engine.trace", of_file=True)),
             "Write a trace of the engine there, for paceline trace show; an existing file is replaced.", ours=True),
        Flag("--trace-max-bytes", "N", read.integer(high=2**62), Store("engine.trace_max_bytes"),
             "The trace ends before it would be larger; the server goes on.", ours=True),
    ),
    "Sampling": (
        *(flag for row in PARAMETERS if row.flags for flag in _flags_of(row)),
        Flag("--sampler-seq --sampling-seq", "LETTERS", read.sampler_letters, Store("sampling.samplers"),
             f"Letters of the samplers, in order: {', '.join(f'{letter} {name}' for letter, name in SAMPLER_LETTERS.items())}."),
        _switch("-e --escape", Store("aside.escape"),
                r"Read \n, \t and the like in --reverse-prompt and --dry-sequence-breaker.", off="--no-escape", default="on"),
        _switch("-bs --backend-sampling", Ignore("tokens are drawn on the CPU; the output is the same"),
                "Draw tokens on the device.", arg="BACKEND_SAMPLING"),
    ),
    "Chat, embeddings, infill": (
        Flag("--chat-template", "JINJA", read.chat_template, Store("server.chat_template"), "Chat template in place of the "
             "model's: its text, or the name chatml, llama3 or command-r.", arg="CHAT_TEMPLATE", default="the model's"),
        Flag("--chat-template-file", "FILE", read.path, Store("server.chat_template", setters.of_file("server.chat_template")),
             "A file with a chat template.", arg="CHAT_TEMPLATE_FILE", default="the model's"),
        Flag("--chat-template-kwargs", "JSON", read.json_object,
             Store("server.chat_template_kwargs", setters.template_variables), "Variables for the template, as a JSON object.",
             arg="CHAT_TEMPLATE_KWARGS", default="none"),
        Flag("-rea --reasoning", "on|off|auto", read.on_off_auto, Store("server.chat_template_kwargs",
             setters.template_variable("enable_thinking", "auto", {"on": True, "off": False})), "Sets enable_thinking, a "
             "variable of the template; auto leaves it to the template.", arg="REASONING", default="auto"),
        Flag("--reasoning-effort", "LEVEL", read.some_text, Store("server.chat_template_kwargs",
             setters.template_variable("reasoning_effort", "default")), "Sets reasoning_effort, a variable of the template; "
             "default leaves it to the template.", arg="REASONING_EFFORT", default="default"),
        _switch("--reasoning-preserve", Store("server.chat_template_kwargs", setters.template_variable("preserve_reasoning")),
                "Sets preserve_reasoning, a variable of the template: keep the reasoning of earlier turns.",
                arg="REASONING_PRESERVE", off="--no-reasoning-preserve", default="as the template has it"),
        Flag("--pooling", "TYPE", read.one_of(("none", "mean", "cls", "last", "rank")), Store("server.pooling"),
             "How the vectors of tokens become an embedding: none, mean, cls, last or rank.", arg="POOLING",
             default="as the model was made"),
        Flag("--max-embedding-tokens", "N", read.integer(1), Store("engine.max_embedding_tokens"),
             "Tokens of the longest text to embed or rerank.", default="as the model was trained", ours=True),
        Flag("--embd-normalize", "N", read.integer(-1), Store("server.embd_normalize"),
             "Length of llama-server's embeddings: -1 as it is, 0 by the greatest, 1 taxicab, 2 Euclidean, above: p-norm."),
        _switch("--spm-infill", Store("server.spm_infill"), "Infill with the suffix before the prefix."),
        _switch("--jinja", NO_OP, "Chat templates are Jinja, which is always so here.", arg="JINJA", off="--no-jinja",
                actions={False: Ignore("chat templates are always read as Jinja")}),
        Flag("--reasoning-format", "FORMAT", read.one_of(("none", "auto", "deepseek", "deepseek-legacy")),
             Store("server.reasoning_format"), "Where thinking goes where a request does not say: none leaves it in the "
             "content, auto and deepseek put it into reasoning_content; deepseek-legacy does as well.", arg="THINK"),
        Flag("--reasoning-budget", "N", read.integer(-1, 2**31 - 1), Store("server.reasoning_budget"),
             "Most tokens of thinking where a request does not say; 0: none, -1: no limit.", arg="THINK_BUDGET"),
        Flag("--reasoning-budget-message", "TEXT", read.text, Store("server.reasoning_budget_message"), "Text that is written "
             "where the budget is used up, before the end of thinking.", arg="THINK_BUDGET_MESSAGE", default="none"),
        _switch("--skip-chat-parsing", Store("server.skip_chat_parsing"), "Leave all generated text in the content, thinking "
                "and tool calls included.", arg="SKIP_CHAT_PARSING", off="--no-skip-chat-parsing"),
        _switch("--untagged-calls", Store("server.untagged_calls"), "Read content that is nothing but the JSON of tool calls "
                "as calls, although the model left out their tags.", off="--no-untagged-calls", default="on", ours=True),
        _switch("--prefill-assistant", Store("server.prefill_assistant"), "Continue a conversation's last message where it "
                "is the assistant's and the request does not say. By itself /apply-template does, as in llama-server, and "
                "OpenAI's chat does not.", arg="PREFILL_ASSISTANT", off="--no-prefill-assistant", default="as the API has it"),
        _switch("-sp --special", Store("server.special"),
                "Give control tokens their names as text, where a request does not say otherwise with special."),
    ),
    "Network": (
        Flag("--host", "ADDRESS,...", read.some_items, Store("server.hosts", convert=_without_repeats),
             "Addresses to listen on, or paths of Unix sockets that end in .sock; 0.0.0.0 or :: for all of this machine.",
             arg="HOST", default="127.0.0.1", many=True),
        Flag("--port", "N", read.integer(0, 65535), Store("server.port"), "Port; 0 takes any that is free.", arg="PORT"),
        Flag("-a --alias", "NAME,...", read.some_items, Store("server.aliases"), "Names of the model; the first is its id, the "
             "others are aliases.", arg="ALIAS", default="the name of the model's file", many=True),
        Flag("--tags", "TEXT,...", read.some_items, Store("server.tags"), "Tags of the model, which GET /v1/models lists.",
             arg="TAGS", default="none", many=True),
        Flag("--api-key", "KEY,...", read.some_items, Store("server.api_keys", setters.api_keys),
             "API keys, one of which a request must have. Beside tenants' keys they are the operator's.",
             variable="LLAMA_API_KEY", default="none: no key is needed", many=True, secret=True),
        Flag("--api-key-file", "FILE", read.path, Store("server.api_keys", setters.api_key_file), "A file with keys as of "
             "--api-key, one a line; lines that begin with # are comments.", arg="API_KEY_FILE", default="none"),
        Flag("--tenant-key-file", "FILE", read.path, Store("server.api_keys", setters.tenant_key_file),
             "A file with TENANT:KEY a line, or NAME.toml with limits and weights of keys. Tenants share nothing of the prefix "
             "cache, and take turns in the queue.", default="none", ours=True),
        Flag("--ssl-key-file", "FILE", read.path, Store("server.ssl_keyfile"), "Private key for TLS, PEM.", arg="SSL_KEY_FILE",
             default="no TLS"),
        Flag("--ssl-cert-file", "FILE", read.path, Store("server.ssl_certfile"), "Certificate for TLS, PEM.",
             arg="SSL_CERT_FILE", default="no TLS"),
        Flag("--api-prefix", "PATH", read.route_prefix, Store("server.root_path"), "Prefix of all routes, such as /llm.",
             arg="API_PREFIX", default="none"),
        Flag("--allowed-hosts", "NAME,...", read.host_names("llm.example.org", or_any=True), Store("server.allowed_hosts"),
             "Host names that requests may use besides localhost, IP addresses and --host; *.name: all below it, *: any.",
             default="none; any with an API key or TLS", many=True, ours=True),
        Flag("--cors-origins --cors-origin", "ORIGIN,...", read.origins, Store("server.cors_origins"),
             "Origins whose pages may call the server from a browser; localhost: this machine's, any port; *: all.",
             arg="CORS_ORIGINS", default="none", many=True),
        Flag("--cors-methods", "NAME,...", read.http_names("GET,POST"), Store("server.cors_methods", convert=_without_repeats),
             "Methods that such pages may use.", arg="CORS_METHODS", default="GET, POST, DELETE, OPTIONS", many=True),
        Flag("--cors-headers",
             "NAME,...", read.http_names("Authorization,Content-Type"), Store("server.cors_headers", convert=_without_repeats),
             "Headers that such pages may send; *: those that they ask for.", arg="CORS_HEADERS", default="*", many=True),
        _switch("--cors-credentials", Store("server.cors_credentials"), "Whether such pages may send cookies; with * every "
                "origin is echoed then.", arg="CORS_CREDENTIALS", off="--no-cors-credentials"),
        Flag("-to --timeout --body-timeout-s", "S", read.number(above=0, high=1e9), Store("server.body_timeout_s"),
             "Seconds that a client may take to send its request, or pause while it reads a response.", arg="TIMEOUT"),
        Flag("--request-timeout-s", "S", read.number(above=0, high=1e9), Store("server.timeout_s"),
             "Seconds that a whole request may take, waiting included.", default="no limit", ours=True),
        Flag("--sse-ping-interval --heartbeat-s", "S", read.seconds("none", math.inf, 1e6), Store("server.heartbeat_s"),
             "Seconds between comments in a stream that waits; -1: none.", arg="SSE_PING_INTERVAL"),
        Flag("--max-body-bytes", "N", read.integer(1, 2**40), Store("server.max_body_bytes"), "Most bytes of a request's body.",
             ours=True),
        Flag("--max-total-body-bytes", "N", read.integer(1, 2**42), Store("server.max_total_body_bytes"), "Most bytes of the "
             "bodies of all requests in flight; further ones get a 429.", default="4 times --max-body-bytes", ours=True),
        Flag("--max-header-bytes", "N", read.integer(1024, 2**30), Store("server.max_header_bytes"),
             "Most bytes of a request's headers.", ours=True),
        Flag("--max-connections", "N", read.integer(1), Store("server.max_connections"),
             "Connections at once, if there are descriptors for them; a new one replaces the longest idle one.", ours=True),
        Flag("--keep-alive-s", "S", read.number(above=0, high=1e6), Store("server.keep_alive_s"),
             "Seconds that an idle connection stays open.", ours=True),
        Flag("--drain-s", "S", read.number(0, 1e6), Store("server.drain_s"), "Seconds that SIGTERM leaves to running requests.",
             ours=True),
        Flag("--threads-http", "N", read.unread, Ignore("one event loop serves all connections"), "Threads for HTTP.",
             arg="THREADS_HTTP"),
        _switch("--reuse-port", Reject("sharing a port is not supported yet; put a proxy before several servers"),
                "Share the port with other servers.", arg="REUSE_PORT"),
    ),
    "Endpoints": (
        _switch("--embedding --embeddings", Store("server.embeddings"),
                "Embeddings, also of a model that was not made for them.", arg="EMBEDDINGS"),
        _switch("--rerank --reranking", Store("server.reranking"),
                "Reranking, also with a model that does not say that it was made for it.", arg="RERANKING"),
        _switch("--metrics", Store("server.metrics"), "GET /metrics, for Prometheus.", arg="ENDPOINT_METRICS",
                off="--no-metrics"),
        _switch("--metrics-per-key", Store("server.metrics_per_key"), "Metrics of each API key, with its name as a label.",
                ours=True),
        _switch("--slots", Store("server.slots"), "GET /slots.", arg="ENDPOINT_SLOTS", off="--no-slots"),
        _switch("--props", Store("server.props"), "POST /props.", arg="ENDPOINT_PROPS"),
        _switch("--docs", Store("server.docs"), "The pages that describe the API, /docs and /openapi.json.", off="--no-docs",
                ours=True),
        _switch("--strict-fields", Store("server.strict_fields"),
                "Refuse requests with unknown fields, which are otherwise ignored with a warning.", ours=True),
        Flag("--responses-store", "N", read.integer(0, 10**6), Store("server.responses_store"),
             "Responses of /v1/responses that are kept in memory for each tenant; 0: none.", ours=True),
        Flag("--responses-store-bytes", "N", read.integer(1, 2**42), Store("server.responses_store_bytes"),
             "Most bytes that they have together, for each tenant.", ours=True),
        Flag("--responses-store-total-bytes", "N", read.integer(1, 2**42), Store("server.responses_store_total_bytes"),
             "Most bytes that those of all tenants have together.", default="four times --responses-store-bytes", ours=True),
        _switch("--batches", Store("server.batches"), "Files and batches of clients: /v1/files and /v1/batches.",
                off="--no-batches", ours=True),
        Flag("--batch-folder", "FOLDER", read.path, Store("server.batch_folder"), "Folder of files and batches, which survive "
             "restarts; of one server.", default="paceline/batches/PORT in the user's state folder", ours=True),
        Flag("--slot-save-path", "FOLDER", read.path, Store("engine.state_folder", setters.in_folder("engine.state_folder",
             kind=str)), "Folder where slots are saved; without it they cannot be.", default="none"),
    ),
    "Log": (
        _switch("-v --verbose --log-verbose", Store("server.log_level", convert=lambda on: "debug" if on else UNSET),
                "Log everything, llama.cpp's own log as well.", default="off"),
        Flag("-lv --verbosity --log-verbosity",
             "N", read.integer(-(2**31)), Store("server.log_level", convert=lambda level: _LOG_LEVELS[min(max(level, 0), 4)]),
             "Log errors (1), warnings too (2), information too (3), everything (4).", arg="LOG_VERBOSITY", default="3"),
        Flag("--log-level", "LEVEL", read.one_of(("off", "error", "warning", "info", "debug")), Store("server.log_level"),
             "The same as a word: off, error, warning, info or debug.", ours=True),
        _switch("--log-disable", Store("server.log_level", convert=lambda on: "off" if on else UNSET), "No log.",
                default="off"),
        Flag("--log-file", "FILE", read.path, Store("server.log_file"), "Log to a file.", arg="LOG_FILE", default="stderr"),
        _switch("--log-jsonl", Store("server.log_json"), "Log as JSON, one object a line.", arg="LOG_JSONL",
                off="--no-log-jsonl"),
        Flag("--log-colors", "on|off|auto", read.on_off_auto, Ignore("the log has no colours"), "Colours in the log.",
             arg="LOG_COLORS", actions={"off": NO_OP, "auto": NO_OP}),
        _switch("--log-prefix", NO_OP, "Levels in the log, which are always there.", arg="LOG_PREFIX", off="--no-log-prefix",
                actions={False: Ignore(_LINES)}),
        _switch("--log-timestamps", NO_OP, "Times in the log, which are always there.", arg="LOG_TIMESTAMPS",
                off="--no-log-timestamps", actions={False: Ignore(_LINES)}),
        Flag("--log-prompts-dir", "FOLDER", read.unread, Reject("prompts are never written down; leave it out"),
             "Write prompts down."),
    ),
    "This command": (
        Flag("--config", "FILE", read.path, ReadConfig(), "The config file of all commands, TOML: the long "
             "names of flags, with _ or -, are keys of its section [serve] or of its top level. What is given elsewhere wins.",
             default="~/.config/paceline/config.toml", ours=True),
        _switch("--print-config", Print("config"), "Print every setting with where it came from, and end.", ours=True),
        _switch("-h --help --usage", Print("help"), "Print this and end."),
        _switch("--version", Print("version"), "Print the version and end."),
        _switch("--completion-bash", Reject("completion for shells is not supported yet; see --help"), "Completion for a shell.",
                actions={}),
        _switch("--list-devices", Reject("it is another command here: run paceline info"), "List devices.", actions={}),
    ),
    "Processors and loading": (
        Flag("-lm --load-mode", "MODE", read.one_of(_LOAD_MODES), Store("engine.load_mode"),
             f"How the file gets into memory: {', '.join(_LOAD_MODES)}.", arg="LOAD_MODE", default="auto"),
        _switch("--check-tensors", Store("engine.check_tensors"), "Look for invalid values in the weights while loading.",
                default="off"),
        _switch("-kvo --kv-offload", Store("engine.offload_kqv"), "Keep the KV cache where the layers are.", arg="KV_OFFLOAD",
                off="-nkvo --no-kv-offload", default="on"),
        _switch("--op-offload", Store("engine.op_offload"),
                "Let the GPU compute large batches with weights that lie in host memory.", off="--no-op-offload", default="on"),
        _switch("--repack", Store("engine.use_extra_bufts"), "Repack weights where a processor computes faster with "
                "another layout.", arg="REPACK", off="-nr --no-repack", default="on"),
        Flag("--packed-cache", "FOLDER", read.path, Store("engine.packed_cache"), "Write repacked weights into this folder, and "
             "map them at later starts instead of repacking them.", default="none", ours=True),
        _switch("--mlock", Store("engine.load_mode", setters.mlock), "Keep the weights from being swapped out: --load-mode "
                "mmap+mlock, or mlock beside --no-mmap.", default="off", ours=True),
        _switch("--mmap", Store("engine.load_mode", setters.mmap), "Map the file: --load-mode mmap, or none for --no-mmap; "
                "beside --mlock mmap+mlock, or mlock.", default="where that is good", off="--no-mmap", ours=True),
        Flag("-C --cpu-mask", "MASK", read.unread, _PLACED, "Processors for threads."),
        Flag("-Cr --cpu-range", "LO-HI", read.unread, _PLACED, "Processors for threads."),
        Flag("--cpu-strict", "0|1", read.unread, _PLACED, "Processors for threads."),
        Flag("--prio", "N", read.unread, _PLACED, "Priority of threads."),
        Flag("--poll", "N", read.unread, _PLACED, "How threads wait."),
        Flag("-Cb --cpu-mask-batch", "MASK", read.unread, _PLACED, "Processors for threads."),
        Flag("-Crb --cpu-range-batch", "LO-HI", read.unread, _PLACED, "Processors for threads."),
        Flag("--cpu-strict-batch", "0|1", read.unread, _PLACED, "Processors for threads."),
        Flag("--prio-batch", "N", read.unread, _PLACED, "Priority of threads."),
        Flag("--poll-batch", "0|1", read.unread, _PLACED, "How threads wait."),
        Flag("--numa", "TYPE", read.unread, _PLACED, "How threads are spread over nodes.", arg="NUMA"),
        _switch("--perf", Ignore("times are always measured; see /metrics"), "Times as llama.cpp measures them.", arg="PERF",
                off="--no-perf"),
        _switch("--no-host", Ignore("llama.cpp's choice of buffers holds; the output is the same"), "Pass over host buffers.",
                arg="NO_HOST"),
        Flag("-lzm --lazy-mode", "MODE", read.one_of(("on", "auto", "off")), Ignore("llama.cpp's choice holds, which is auto; "
             "the output is the same"), "Read some tensors when they are needed.", arg="LAZY_MODE", actions={"auto": NO_OP}),
        Flag("-dt --defrag-thold", "N", read.unread, Ignore("llama.cpp has no use for it any more"), "Defragmentation.",
             arg="DEFRAG_THOLD"),
        _switch("--warmup", NO_OP, "A first pass before the first request.", off="--no-warmup",
                actions={False: Ignore("the engine always warms up with a pass when it starts")}),
        Flag("--control-vector", "FILE", read.unread, _STEERING, "A control vector."),
        Flag("--control-vector-scaled", "FILE:SCALE,...", read.unread, _STEERING, "Control vectors with scales."),
        Flag("--control-vector-layer-range", "START END", read.unread, _STEERING, "Layers of control vectors."),
        Flag("-ctxcp --ctx-checkpoints --swa-checkpoints", "N", read.unread,
             Ignore("the memory of idle prefixes is bounded by --cache-ram"), "Saved states of a slot.", arg="CTX_CHECKPOINTS"),
        Flag("-cms --checkpoint-min-step", "N", read.unread, Ignore("the memory of idle prefixes is bounded by --cache-ram"),
             "Distance of saved states.", arg="CHECKPOINT_MIN_SPACING_NT"),
        _switch("--cache-idle-slots",
                NO_OP, "Keep what an ended request has computed, which is how it is unless --no-cache-prompt is given.",
                arg="CACHE_IDLE_SLOTS", off="--no-cache-idle-slots", actions={False: Ignore("what ended requests have computed "
                "is kept; --no-cache-prompt or --cache-ram 0 keep less")}),
        Flag("--cache-reuse", "N", read.integer(0), Ignore("what was computed is shared up to the first different token, and "
             "never moved to another position"), "Reuse chunks at other positions.", arg="CACHE_REUSE", actions={0: NO_OP}),
        Flag("-sps --slot-prompt-similarity", "N", read.unread, Ignore("every slot can use what any other has computed"),
             "How a slot is chosen."),
        _switch("-cb --cont-batching",
                NO_OP, "Continuous batching, which is always on.", arg="CONT_BATCHING", off="-nocb --no-cont-batching",
                actions={False: Ignore("continuous batching is always on; -np 1 runs one request at a time")}),
        Flag("--sleep-idle-seconds", "S", read.seconds("never", UNSET), Store("engine.sleep_idle_s"),
             "Seconds without a request after which the model is unloaded until the next one; -1: never.", default="-1"),
        Flag("--model-changed", "ACTION", read.one_of(("reload", "refuse")), Store("server.model_changed"),
             "When a file of the model was replaced and a new process would load it: reload the model, or refuse all requests "
             "until the server is restarted or the model is loaded by /models/load.", ours=True),
    ),
    "Downloads": (
        Flag("-hf -hfr --hf-repo", "USER/REPO[:QUANT]", read.repository, Store("aside.repository"), "Model of the Hugging "
             "Face Hub, downloaded unless it is there. Without QUANT: Q4_K_M, else Q8_0 or the first that fits into memory.",
             arg="HF_REPO", default="not used"),
        Flag("-hff --hf-file", "FILE", read.repository_file, Store("aside.repository_file"), "This file of --hf-repo.",
             arg="HF_FILE", default="not used"),
        Flag("-hft --hf-token", "TOKEN", read.unread, Store("aside.hf_token"), "Token of the Hugging Face Hub.",
             variable="HF_TOKEN", secret=True, default="that of `hf auth login`"),
        Flag("-mu --model-url", "URL", read.url, Store("aside.model_url"), "Model of the web, downloaded unless it is there; "
             "of a split set, any of its parts.", arg="MODEL_URL", default="not used"),
        _switch("--offline", Store("aside.offline"), "Download nothing: models that are given by name are looked for in the "
                "caches. HF_HUB_OFFLINE does the same.", arg="OFFLINE", default="off"),
        _value("-dr --docker-repo", _DOCKER, "A model from Docker Hub.", arg="DOCKER_REPO", metavar="REPO"),
        _switch("-cl --cache-list", Reject("run `paceline list`, which lists them"), "List downloads."),
        *(
            _switch(f"--{name}", _HUB, "A certain model from the web.")
            for name in (
                "embd-gemma-default",
                "fim-qwen-1.5b-default",
                "fim-qwen-3b-default",
                "fim-qwen-7b-default",
                "fim-qwen-7b-spec",
                "fim-qwen-14b-spec",
                "fim-qwen-30b-default",
                "gpt-oss-20b-default",
                "gpt-oss-120b-default",
                "vision-gemma-4b-default",
                "vision-gemma-12b-default",
            )
        ),
    ),
    "Speculation": (
        Flag("--spec-type", "TYPE,...", read.text, Store("aside.spec_type", setters.spec_type), "How drafts are made, with "
             "llama-server's sizes: none; ngram-simple and ngram-map-k, which are --speculation ngram; draft-simple, which "
             "is the draft model of -md, and the default with it; draft-mtp, the next-token-prediction heads in the model's "
             "file or that of -md; draft-eagle3, the EAGLE-3 file of -md; draft-dflash and draft-dspark, the DFlash or DSpark "
             "file of -md. Of several, in this order, the first that proposes something for a sequence counts in a tick.",
             arg="SPEC_TYPE", actions=dict.fromkeys(setters.OTHERS, SPECULATION) | dict.fromkeys(setters.SHARED_NGRAMS,
             _OWN_NGRAMS), default="none"),
        Flag("--speculation", "NAME", read.name_or_table, Store("engine.speculation", setters.named("speculation",
             check_drafter_name)), "What proposes tokens ahead of decoding: ngram, draft-model, mtp, eagle3, dflash, "
             "or module:attr. Options follow the name, as in ngram:size_n=6,size_m=16; in a file also as a table with the key "
             "name. Of several, apart by commas, the first that proposes something counts.", table=True, ours=True),
        Flag("-md --spec-draft-model --model-draft", "FILE", read.path, Store("aside.draft_path"),
             "A draft model: a second, small model with the same vocabulary proposes what the large one will say.",
             arg="SPEC_DRAFT_MODEL", default="none"),
        Flag("-hfd --spec-draft-hf -hfrd --hf-repo-draft", "USER/REPO[:QUANT]", read.repository,
             Store("aside.draft_repository"), "The same of the Hugging Face Hub, as -hf.", arg="SPEC_DRAFT_HF_REPO",
             default="none"),
        Flag("--spec-draft-p-min --draft-p-min", "P", read.number(0, 1), Store("aside.draft.p_min"),
             "A token that the draft model or heads find less likely ends a proposal.", arg="SPEC_DRAFT_P_MIN", default="0"),
        Flag("-ngld --spec-draft-ngl --gpu-layers-draft --n-gpu-layers-draft", "N", read.layers,
             Store("aside.draft.n_gpu_layers"), "Layers of the draft model on the GPU, as -ngl.", arg="N_GPU_LAYERS_DRAFT",
             default="all"),
        Flag("-devd --spec-draft-device --device-draft", "NAME,...", read.some_items,
             Store("aside.draft.devices", convert=lambda names: ["CPU"] if names == ("none",) else list(names)),
             "Devices of the draft model, as --device.", default="all", many=True),
        Flag("-td --spec-draft-threads --threads-draft", "N", read.automatic_below(1, 512), Store("aside.draft.n_threads"),
             "Threads of the draft model.", default="as -t"),
        Flag("-tbd --spec-draft-threads-batch --threads-batch-draft", "N", read.automatic_below(1, 512),
             Store("aside.draft.n_threads_batch"), "The same while it computes prompts.", default="as -tb"),
        Flag("-ctkd --spec-draft-type-k --cache-type-k-draft", "TYPE", read.one_of(_CACHE_TYPES), Store("aside.draft.type_k"),
             "Type of the keys in the draft model's cache, as -ctk.", arg="SPEC_DRAFT_CACHE_TYPE_K", default="f16"),
        Flag("-ctvd --spec-draft-type-v --cache-type-v-draft", "TYPE", read.one_of(_CACHE_TYPES), Store("aside.draft.type_v"),
             "Type of the values in the draft model's cache, as -ctv.", arg="SPEC_DRAFT_CACHE_TYPE_V", default="f16"),
        Flag("-otd --spec-draft-override-tensor --override-tensor-draft", "PATTERN=TYPE,...", read.placements,
             Store("aside.draft.tensor_overrides", convert=dict), "Buffers of the draft model's tensors, as -ot.",
             default="none", many=True),
        _switch("-cmoed --spec-draft-cpu-moe --cpu-moe-draft", Store("aside.draft.cpu_moe"),
                "Keep the draft model's experts in host memory.", arg="SPEC_DRAFT_CPU_MOE", default="off"),
        Flag("-ncmoed --spec-draft-n-cpu-moe --spec-draft-ncmoe --n-cpu-moe-draft", "N", read.integer(0, 512),
             Store("aside.draft.n_cpu_moe"), "The same for the experts of its first N layers.", arg="SPEC_DRAFT_N_CPU_MOE",
             default="0"),
        Flag("--spec-draft-n-max", "N", read.integer(1, 64), Store("engine.max_draft"), "Most tokens that are proposed for a "
             "sequence in a tick; fewer are where more do not pay.", arg="SPEC_DRAFT_N_MAX"),
        Flag("--spec-draft-n-min", "N", read.integer(0, 64), Store("engine.min_draft"),
             "Least tokens of a proposal that is verified.", arg="SPEC_DRAFT_N_MIN"),
        *(
            flag
            for kind in ("ngram-simple", "ngram-map-k")
            for flag in (
                _size(f"{kind}-size-n", 1, 64, "Tokens that have to match", kind),
                _size(f"{kind}-size-m", 1, 64, "Most tokens of a proposal", kind),
                _size(f"{kind}-min-hits", 1, None, "Earlier occurrences without which nothing is proposed", kind),
            )
        ),
        _switch("--spec-default", Store("aside.spec_type", setters.spec_default), "Draft by ngram-simple, beside the kinds of "
                "--spec-type; llama-server drafts by ngram-mod here.", default="off"),
        *(_value(names, SPECULATION, "About drafts.", arg=arg) for names, arg in _DRAFTS),
        *(_value(names, _OWN_NGRAMS, "About n-grams of all requests.", metavar=value) for names, value in _SHARED_NGRAMS),
        *(_value(names, _PLACED, "Threads of the draft model.") for names in _DRAFT_THREADS),
        _switch("--spec-draft-backend-sampling", Ignore("tokens of a draft model are drawn on the CPU"), "About drafts.",
                arg="SPEC_DRAFT_BACKEND_SAMPLING", off="--no-spec-draft-backend-sampling"),
        *(_value(names, _REMOVED, "About drafts.", arg=arg) for names, arg in _REMOVED_NAMES),
    ),
    "Images and video": (
        Flag("-mm --mmproj", "FILE", read.path,
             Store("aside.mmproj_path"), "The model's multimodal projector, with which requests may have images.", arg="MMPROJ",
             default="the one beside the model, if there is one; with -hf that of its repository"),
        Flag("-mmu --mmproj-url", "URL", read.url, Store("aside.mmproj_url"), "The same, downloaded.", arg="MMPROJ_URL",
             default="none"),
        _switch("--mmproj-auto", Store("aside.mmproj_auto"),
                "Take the projector that is beside the model, or in its repository; off: requests have no images.",
                arg="MMPROJ_AUTO", off="--no-mmproj --no-mmproj-auto", default="on"),
        _switch("--mmproj-offload", Store("engine.mmproj_offload"), "Compute the projector on a GPU, if there is one.",
                arg="MMPROJ_OFFLOAD", off="--no-mmproj-offload"),
        _value("-mmdev --mmproj-device", Ignore("the projector computes on the first GPU; --no-mmproj-offload keeps "
               "it on the CPU"), "The projector's device.", variable="MTMD_BACKEND_DEVICE", metavar="NAME"),
        Flag("--image-min-tokens", "N", read.integer(1), Store("engine.image_min_tokens"), "Least tokens of an image, for "
             "projectors that take images of any size.", arg="IMAGE_MIN_TOKENS", default="the projector's"),
        Flag("--image-max-tokens", "N", read.integer(1), Store("engine.image_max_tokens"), "Most tokens of an image, likewise.",
             arg="IMAGE_MAX_TOKENS", default="the projector's"),
        Flag("--max-images", "N", read.integer(0, MAX_ATTACHMENTS), Store("server.max_images"), "Most images of a request.",
             ours=True),
        Flag("--media-cache-bytes", "N", read.integer(0, 2**50), Store("engine.media_cache_bytes"),
             "Memory for embeddings of images that no running request needs.", ours=True),
        Flag("--media-domains", "NAME,...", read.host_names("images.example.org"), Store("server.media_domains"),
             "Hosts that images are fetched from by their URLs; *.name: all below it. Only public addresses are connected to.",
             default="none; nothing is fetched", many=True, ours=True),
        Flag("--media-marker", "TEXT", read.some_text, Store("server.media_marker"),
             "What stands for an image in the prompts of /completion; GET /props has it.", variable="LLAMA_MEDIA_MARKER",
             default="a random one for each start", ours=True),
        _value("--mtmd-batch-max-tokens", Ignore("images are encoded one at a time"), "Image tokens of a batch.",
               arg="MTMD_BATCH_MAX_TOKENS"),
        _value("--video-fps", _NO_VIDEO, "Frames of a video.", arg="VIDEO_FPS"),
        _value("--video-timestamp-interval", _NO_VIDEO, "Times in a video.", arg="VIDEO_TIMESTAMP_INTERVAL"),
        _value("--video-ffmpeg-dir", _NO_VIDEO, "Where ffmpeg is.", arg="VIDEO_FFMPEG_DIR", metavar="FOLDER"),
        _value("--media-path", Reject("the server reads no files for its clients; let them send the data"),
               "Folder of media files.", metavar="FOLDER"),
    ),
    "Several models, tools, web pages": (
        Flag("--models-preset", "FILE", read.path, Store("server.models_preset"), "Serve the models of this "
             "file by name: llama-server's presets (.ini), or .toml. Any flag of this group, without a model, serves several.",
             arg="MODELS_PRESET", default="none"),
        Flag("--models-dir", "FOLDER", read.path, Store("server.models_dir"), "Serve the GGUF files of this folder by name; of "
             "its folders, the model in each.", arg="MODELS_DIR", default="none"),
        Flag("--models-max", "N", read.integer(0), Store("server.models_max"), "Models that are loaded at once; 0: no limit. "
             "The one used least recently is unloaded for another.", arg="MODELS_MAX"),
        Flag("--models-memory", "MIB", read.integer(1), Store("server.models_memory", convert=lambda mib: mib << 20),
             "Memory that the loaded models may take together, in MiB.", default="no limit", ours=True),
        _switch("--models-autoload", Store("server.models_autoload"), "Load a model when a request names it.",
                arg="MODELS_AUTOLOAD", off="--no-models-autoload"),
        _switch("--spare-worker", Store("server.spare_worker"), "Where several models are served: have a process wait for the "
                "next one to be loaded, in about 50 MB.", off="--no-spare-worker", ours=True),
        _value("--tools", _TOOLS, "Tools that the server runs.", arg="TOOLS", metavar="NAME,..."),
        _value("--tools-runtime", _TOOLS, "Where tools run.", arg="TOOLS_RUNTIME", metavar="TEXT"),
        _value("--mcp-servers-config", _TOOLS, "MCP servers.", arg="MCP_SERVERS_CONFIG", metavar="FILE"),
        _value("--mcp-servers-json", _TOOLS, "MCP servers.", arg="MCP_SERVERS_JSON", metavar="JSON"),
        _switch("-ag --agent", _TOOLS, "All tools.", arg="AGENT", off="-no-ag --no-agent"),
        _switch("--ui-mcp-proxy --webui-mcp-proxy", _TOOLS, "A proxy to MCP servers.", arg="UI_MCP_PROXY",
                off="--no-ui-mcp-proxy --no-webui-mcp-proxy"),
        _switch("--ui --webui", Store("server.start_page"),
                "GET /: the web page, to chat and to see the engine work.", arg="UI", off="--no-ui --no-webui",
                default="on where only this machine reaches the server, or it has API keys"),
        _value("--ui-config --webui-config", _NO_PAGES, "Its settings.", arg="UI_CONFIG", metavar="JSON"),
        _value("--ui-config-file --webui-config-file", _NO_PAGES, "Its settings.", arg="UI_CONFIG_FILE", metavar="FILE"),
        Flag("--path", "FOLDER", read.path, Store("server.page_folder", setters.in_folder("server.page_folder")),
             "Serve the files of this folder in place of the web page; they need no API key.", arg="STATIC_PATH",
             default="the page that was built into the package"),
    ),
}
# fmt: on

FLAGS: Final = tuple(flag for rows in GROUPS.values() for flag in rows)

BY_NAME: Final = {
    **{name: (flag, True) for flag in FLAGS for name in flag.names},
    **{name: (flag, False) for flag in FLAGS for name in flag.off_names},
}
"""Each name, with whether it means True (or takes a value) or False."""

BY_KEY: Final = {
    name[2:]: found
    for name, found in BY_NAME.items()
    if name.startswith("--") and not isinstance(found[0].action, Print | ReadConfig)
}
"""The long names as keys of a file."""

ENV_NAMES: Final = frozenset(
    name for flag in FLAGS for name in (*flag.own_envs, flag.env, flag.off_env) if name is not None
)
