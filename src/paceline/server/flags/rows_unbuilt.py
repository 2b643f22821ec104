"""Rows of the table: what llama-server has and this server does not have, or not yet."""

from __future__ import annotations

from typing import Final

from paceline.server.flags import reading
from paceline.server.flags.flag import SAME, SWITCH, Flag, Group, Ignored, Refused

_HUB = Refused("downloading models is not supported yet; download the file yourself and name it with -m")
_SPECULATION = Refused("speculative decoding is not supported yet; leave out everything about drafts")
_REMOVED = Refused("llama-server has removed it, and speculative decoding is not supported yet; leave it out")
_IMAGES = Refused("images, sound and video are not supported yet; leave it out")
_NO_IMAGES = Ignored("it is about images and video, which are not supported yet")
_ROUTER = Refused("one server serves one model; start one for each, and name it with -m")
_NO_ROUTER = Ignored("one server serves one model")
_TOOLS = Refused("the server runs no tools; let the client run them")
_PAGES = Refused("the server serves no files; put a web server beside it")
_NO_PAGES = Ignored("there is no user interface in a browser")


def _value(spelled: str, fate: Refused | Ignored, text: str, *, env: str | None = None, metavar: str = "N") -> Flag:
    return Flag(spelled, metavar, reading.unread, fate, text, env=env)


def _switch(spelled: str, fate: Refused | Ignored, text: str, *, env: str | None = None, off: str = "") -> Flag:
    return Flag(spelled, SWITCH, reading.switch, fate, text, env=env, off=off, but={False: SAME})


_DOWNLOADS: Final = (
    _value("-mu --model-url", _HUB, "A model from the web.", env="LLAMA_ARG_MODEL_URL", metavar="URL"),
    _value("-dr --docker-repo", _HUB, "A model from Docker Hub.", env="LLAMA_ARG_DOCKER_REPO", metavar="REPO"),
    _value("-hf -hfr --hf-repo", _HUB, "A model from Hugging Face.", env="LLAMA_ARG_HF_REPO", metavar="REPO"),
    _value("-hff --hf-file", _HUB, "A file of it.", env="LLAMA_ARG_HF_FILE", metavar="FILE"),
    Flag(
        "-hft --hf-token",
        "TOKEN",
        reading.unread,
        Ignored("nothing is downloaded"),
        "A token for Hugging Face.",
        env="HF_TOKEN",
        secret=True,
    ),
    _switch("-cl --cache-list", Refused("there is no cache of downloads; name files with -m"), "List downloads."),
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
)

_DRAFTS = (  # names and environment variable of what takes a value
    ("--spec-draft-type-k -ctkd --cache-type-k-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K"),
    ("--spec-draft-type-v -ctvd --cache-type-v-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V"),
    ("--spec-draft-hf -hfd -hfrd --hf-repo-draft", "LLAMA_ARG_SPEC_DRAFT_HF_REPO"),
    ("--spec-draft-threads -td --threads-draft", None),
    ("--spec-draft-threads-batch -tbd --threads-batch-draft", None),
    ("--spec-draft-cpu-mask -Cd --cpu-mask-draft", None),
    ("--spec-draft-cpu-range -Crd --cpu-range-draft", None),
    ("--spec-draft-cpu-strict --cpu-strict-draft", None),
    ("--spec-draft-prio --prio-draft", None),
    ("--spec-draft-poll --poll-draft", None),
    ("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", None),
    ("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", None),
    ("--spec-draft-prio-batch --prio-batch-draft", None),
    ("--spec-draft-poll-batch --poll-batch-draft", None),
    ("--spec-draft-override-tensor -otd --override-tensor-draft", None),
    ("--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft", "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE"),
    ("--spec-draft-n-max", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    ("--spec-draft-n-min", "LLAMA_ARG_SPEC_DRAFT_N_MIN"),
    ("--spec-synth-len", "LLAMA_ARG_SPEC_SYNTH_LEN"),
    ("--spec-synth-rates", "LLAMA_ARG_SPEC_SYNTH_RATES"),
    ("--spec-draft-p-split --draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT"),
    ("--spec-draft-p-min --draft-p-min", "LLAMA_ARG_SPEC_DRAFT_P_MIN"),
    ("--spec-draft-device -devd --device-draft", None),
    ("--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft", "LLAMA_ARG_N_GPU_LAYERS_DRAFT"),
    ("--spec-draft-model -md --model-draft", "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    *((f"--spec-ngram-mod-n-{name}", None) for name in ("min", "max", "match")),
    *(
        (f"--spec-ngram-{kind}-{name}", None)
        for kind in ("simple", "map-k", "map-k4v")
        for name in ("size-n", "size-m", "min-hits")
    ),
    ("-lcs --lookup-cache-static", None),
    ("-lcd --lookup-cache-dynamic", None),
)
_REMOVED_NAMES = (
    ("--draft --draft-n --draft-max", "LLAMA_ARG_DRAFT_MAX"),
    ("--draft-min --draft-n-min", "LLAMA_ARG_DRAFT_MIN"),
    *((f"--spec-ngram-{name}", None) for name in ("size-n", "size-m", "min-hits")),
)

_SPECULATIVE: Final = (
    Flag(
        "--spec-type",
        "TYPE,...",
        reading.text,
        _SPECULATION,
        "How drafts are made; none is how it is.",
        env="LLAMA_ARG_SPEC_TYPE",
        but={"none": SAME},
    ),
    *(_value(names, _SPECULATION, "About drafts.", env=env) for names, env in _DRAFTS),
    _switch(
        "--spec-draft-cpu-moe -cmoed --cpu-moe-draft", _SPECULATION, "About drafts.", env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE"
    ),
    _switch(
        "--spec-draft-backend-sampling",
        Ignored("it is about drafts, and speculative decoding is not supported yet"),
        "About drafts.",
        env="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
        off="--no-spec-draft-backend-sampling",
    ),
    _switch("--spec-default", _SPECULATION, "Drafts as llama-server makes them."),
    *(_value(names, _REMOVED, "About drafts.", env=env) for names, env in _REMOVED_NAMES),
)

_MEDIA: Final = (
    _value("-mm --mmproj", _IMAGES, "A projector for images.", env="LLAMA_ARG_MMPROJ", metavar="FILE"),
    _value("-mmu --mmproj-url", _IMAGES, "A projector from the web.", env="LLAMA_ARG_MMPROJ_URL", metavar="URL"),
    _switch(
        "--mmproj-auto",
        _NO_IMAGES,
        "Use a projector that is there.",
        env="LLAMA_ARG_MMPROJ_AUTO",
        off="--no-mmproj --no-mmproj-auto",
    ),
    _switch(
        "--mmproj-offload",
        _NO_IMAGES,
        "The projector on a GPU.",
        env="LLAMA_ARG_MMPROJ_OFFLOAD",
        off="--no-mmproj-offload",
    ),
    _value("-mmdev --mmproj-device", _NO_IMAGES, "The projector's device.", env="MTMD_BACKEND_DEVICE", metavar="NAME"),
    _value("--image-min-tokens", _NO_IMAGES, "Tokens of an image.", env="LLAMA_ARG_IMAGE_MIN_TOKENS"),
    _value("--image-max-tokens", _NO_IMAGES, "Tokens of an image.", env="LLAMA_ARG_IMAGE_MAX_TOKENS"),
    _value("--mtmd-batch-max-tokens", _NO_IMAGES, "Image tokens of a batch.", env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS"),
    _value("--video-fps", _NO_IMAGES, "Frames of a video.", env="LLAMA_ARG_VIDEO_FPS"),
    _value("--video-timestamp-interval", _NO_IMAGES, "Times in a video.", env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL"),
    _value("--video-ffmpeg-dir", _NO_IMAGES, "Where ffmpeg is.", env="LLAMA_ARG_VIDEO_FFMPEG_DIR", metavar="FOLDER"),
    _value("--media-path", _IMAGES, "Folder of media files.", metavar="FOLDER"),
)

_OTHERS: Final = (
    _value("--models-dir", _ROUTER, "A folder of models.", env="LLAMA_ARG_MODELS_DIR", metavar="FOLDER"),
    _value("--models-preset", _ROUTER, "A file of models.", env="LLAMA_ARG_MODELS_PRESET", metavar="FILE"),
    _value("--models-max", _NO_ROUTER, "Models at once.", env="LLAMA_ARG_MODELS_MAX"),
    _switch(
        "--models-autoload",
        _NO_ROUTER,
        "Load models when asked.",
        env="LLAMA_ARG_MODELS_AUTOLOAD",
        off="--no-models-autoload",
    ),
    _value("--tags", Ignored("nothing reads tags"), "Tags of the model.", env="LLAMA_ARG_TAGS", metavar="TEXT,..."),
    _value("--tools", _TOOLS, "Tools that the server runs.", env="LLAMA_ARG_TOOLS", metavar="NAME,..."),
    _value("--tools-runtime", _TOOLS, "Where tools run.", env="LLAMA_ARG_TOOLS_RUNTIME", metavar="TEXT"),
    _value("--mcp-servers-config", _TOOLS, "MCP servers.", env="LLAMA_ARG_MCP_SERVERS_CONFIG", metavar="FILE"),
    _value("--mcp-servers-json", _TOOLS, "MCP servers.", env="LLAMA_ARG_MCP_SERVERS_JSON", metavar="JSON"),
    _switch("-ag --agent", _TOOLS, "All tools.", env="LLAMA_ARG_AGENT", off="-no-ag --no-agent"),
    _switch(
        "--ui-mcp-proxy --webui-mcp-proxy",
        _TOOLS,
        "A proxy to MCP servers.",
        env="LLAMA_ARG_UI_MCP_PROXY",
        off="--no-ui-mcp-proxy --no-webui-mcp-proxy",
    ),
    _switch("--ui --webui", _NO_PAGES, "A user interface.", env="LLAMA_ARG_UI", off="--no-ui --no-webui"),
    _value("--ui-config --webui-config", _NO_PAGES, "Its settings.", env="LLAMA_ARG_UI_CONFIG", metavar="JSON"),
    _value(
        "--ui-config-file --webui-config-file",
        _NO_PAGES,
        "Its settings.",
        env="LLAMA_ARG_UI_CONFIG_FILE",
        metavar="FILE",
    ),
    _value("--path", _PAGES, "Files to serve.", env="LLAMA_ARG_STATIC_PATH", metavar="FOLDER"),
)

GROUPS: Final[dict[Group, tuple[Flag, ...]]] = {
    "Downloads": _DOWNLOADS,
    "Speculation": _SPECULATIVE,
    "Images and video": _MEDIA,
    "Several models, tools, web pages": _OTHERS,
}
