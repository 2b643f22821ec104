"""A disk in memory, a resolution on it, and an example of every flag that sets something."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.hub import LocalModel, ModelReference
from paceline.server.flags import Resolved, resolve
from paceline.server.settings import ApiKey

TRAINED = 2048


class FakeFiles:
    """Files by their paths; folders are the names among them."""

    def __init__(
        self, contents: Mapping[str, bytes | str] | None = None, folders: tuple[str, ...] = ("states",)
    ) -> None:
        self.contents = {"m.gguf": b"", **(contents or {})}
        self.folders = folders
        self.cached: dict[str, Path] = {}

    def read(self, path: Path) -> bytes:
        found = self.contents.get(str(path))
        if found is None:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return found.encode() if isinstance(found, str) else found

    def is_file(self, path: Path) -> bool:
        return str(path) in self.contents

    def is_folder(self, path: Path) -> bool:
        return str(path) in self.folders

    def download(
        self,
        model: ModelReference,
        target: Path | None,
        *,
        offline: bool,
        hf_token: str | None,
        with_projector: bool = False,
    ) -> LocalModel:
        """Return a path that has all of the spec; the repository user/seeing has a projector."""
        path = Path("cache", str(model), str(target), str(offline), "token" if hf_token else "no token")
        projector = Path("mmproj-seeing.gguf") if with_projector and "seeing" in str(model) else None
        return LocalModel(name=str(model), parts=(path,), projector=projector, source="huggingface")

    def names(self, folder: Path) -> list[str]:
        """The names of the files in the folder."""
        paths = [Path(path) for path in (*self.contents, *self.folders)]
        found = sorted(path.name for path in paths if path.parent == folder)
        if not found:
            raise FileNotFoundError(2, "No such file or directory", str(folder))
        return found

    def cached_models(self) -> Mapping[str, Path]:
        return self.cached

    def trained_context(self, model: Path | None) -> int:
        return TRAINED


FILES = {
    "m.gguf": "",
    "a.gguf": "",
    "x/b.gguf": "",
    "g.gbnf": 'root ::= "a"',
    "s.json": '{"type": "object"}',
    "t.jinja": "{{ messages }}",
    "keys": "# ours\none:two\n\nthree\r\n",
    "tenants": "# ours\nacme:one:two\n",
    "k.pem": "",
    "c.pem": "",
}


def resolved(*argv: str, env: Mapping[str, str] | None = None, files: Mapping[str, Any] | None = None) -> Resolved:
    return resolve(argv, env or {}, FakeFiles({**FILES, **(files or {})}))


_DRAFTING = {"engine.draft_model": "m.gguf", "engine.speculation": {"name": "draft-model"}}

EXAMPLES: dict[str, tuple[list[str], dict[str, Any]]] = {  # what is given, and what has to be set then
    "--model": (["m.gguf"], {"server.model": Path("m.gguf")}),
    "--hf-repo": (
        ["user/repo:Q4_0"],
        {"server.model": Path("cache/user/repo:Q4_0/None/False/no token"), "server.aliases": ("user/repo:Q4_0",)},
    ),
    "--hf-file": (
        ["a/b.gguf", "-hf", "user/repo:Q4_0"],
        {"server.model": Path("cache/user/repo/a/b.gguf/None/False/no token")},
    ),
    "--hf-token": (["x", "-hf", "user/repo"], {"server.model": Path("cache/user/repo/None/False/token")}),
    "--model-url": (
        ["http://host/x.gguf", "-m", "to.gguf"],
        {"server.model": Path("cache/http://host/x.gguf/to.gguf/False/no token")},
    ),
    "--offline": (["-hf", "user/repo"], {"server.model": Path("cache/user/repo/None/True/no token")}),
    "--ctx-size": (["4096"], {"engine.n_ctx": 4096}),
    "--parallel": (["3"], {"engine.num_slots": 3}),
    "--kv-unified-per-slot": (["1000"], {"engine.n_ctx": 8000}),
    "--batch-size": (["64"], {"engine.n_batch": 64}),
    "--ubatch-size": (["32"], {"engine.n_ubatch": 32}),
    "--gpu-layers": (["12"], {"engine.n_gpu_layers": 12}),
    "--rpc": (["10.0.0.2:50052,b:1"], {"engine.rpc": ["10.0.0.2:50052", "b:1"]}),
    "--rpc-timeout": (["5"], {"engine.rpc_timeout_s": 5.0}),
    "--device": (["CPU"], {"engine.devices": ["CPU"]}),
    "--split-mode": (["row"], {"engine.split_mode": "row"}),
    "--tensor-split": (["3,1"], {"engine.tensor_split": (3.0, 1.0)}),
    "--main-gpu": (["1"], {"engine.main_gpu": 1}),
    "--override-tensor": (["a.*=CPU,b=CPU"], {"engine.tensor_overrides": {"a.*": "CPU", "b": "CPU"}}),
    "--cpu-moe": ([], {"engine.cpu_moe": True}),
    "--n-cpu-moe": (["3"], {"engine.n_cpu_moe": 3}),
    "--n-cpu-ffn": (["2"], {"engine.n_cpu_ffn": 2}),
    "--fit": (["off"], {"engine.fit": False}),
    "--fit-target": (["512,1024"], {"engine.fit_target_bytes": (512 << 20, 1024 << 20)}),
    "--fit-ctx": (["2048"], {"engine.fit_ctx": 2048}),
    "--fit-cache": (["2048"], {"engine.fit_cache_bytes": 2048 << 20}),
    "--flash-attn": (["on"], {"engine.flash_attn": "on"}),
    "--cache-type-k": (["q8_0"], {"engine.type_k": "q8_0"}),
    "--cache-type-v": (["bf16"], {"engine.type_v": "bf16"}),
    "--threads": (["2"], {"engine.n_threads": 2}),
    "--threads-batch": (["3"], {"engine.n_threads_batch": 3}),
    "--lora": (
        ["a.gguf,x/b.gguf"],
        {"engine.lora": {"a": "a.gguf", "b": "x/b.gguf"}, "server.lora_scales": {"a": 1, "b": 1}},
    ),
    "--mmproj": (["a.gguf"], {"engine.mmproj": "a.gguf"}),
    "--mmproj-url": (["https://x.example/mmproj.gguf"], {"engine.mmproj": "https://x.example/mmproj.gguf"}),
    "--mmproj-auto": ([], {"engine.mmproj": None}),
    "--mmproj-offload": ([], {"engine.mmproj_offload": True}),
    "--image-min-tokens": (["8"], {"engine.image_min_tokens": 8}),
    "--image-max-tokens": (["64"], {"engine.image_max_tokens": 64}),
    "--max-images": (["3"], {"server.max_images": 3}),
    "--media-cache-bytes": (["1000"], {"engine.media_cache_bytes": 1000}),
    "--media-domains": (["a.example,*.b.example"], {"server.media_domains": ("a.example", "*.b.example")}),
    "--media-marker": (["<image>"], {"server.media_marker": "<image>"}),
    "--lora-scaled": (["a.gguf:0.5"], {"engine.lora": {"a": "a.gguf"}, "server.lora_scales": {"a": 0.5}}),
    "--lora-modules": (
        ["s=a.gguf,t=x/b.gguf"],
        {"engine.lora": {"s": "a.gguf", "t": "x/b.gguf"}, "server.lora_scales": {}},
    ),
    "--enable-lora-loading": ([], {"server.lora_loading": True}),
    "--lora-init-without-apply": (["--lora", "a.gguf"], {"engine.lora": {"a": "a.gguf"}, "server.lora_scales": {}}),
    "--override-kv": (
        ["a=int:1,b=bool:true,c=str:x,d=float:0.5"],
        {"engine.kv_overrides": {"a": 1, "b": True, "c": "x", "d": 0.5}},
    ),
    "--cache-ram": (["2"], {"engine.host_cache_bytes": 2 << 20}),
    "--host-cache-bytes": (["5"], {"engine.host_cache_bytes": 5}),
    "--disk-cache": (["prefixes"], {"engine.disk_cache": "prefixes"}),
    "--no-disk-cache": ([], {"engine.disk_cache": None}),
    "--disk-cache-bytes": (["1000000"], {"engine.disk_cache_bytes": 1_000_000}),
    "--cache-prompt": ([], {"engine.cache_prompt": True}),
    "--swa-full": ([], {"engine.swa_full": True}),
    "--rope-scaling": (["yarn"], {"engine.rope_scaling": "yarn"}),
    "--rope-scale": (["4"], {"engine.rope_freq_scale": 0.25}),
    "--rope-freq-base": (["10000"], {"engine.rope_freq_base": 10000.0}),
    "--rope-freq-scale": (["0.5"], {"engine.rope_freq_scale": 0.5}),
    "--yarn-orig-ctx": (["512"], {"engine.yarn_orig_ctx": 512}),
    "--yarn-ext-factor": (["0.5"], {"engine.yarn_ext_factor": 0.5}),
    "--yarn-attn-factor": (["1.5"], {"engine.yarn_attn_factor": 1.5}),
    "--yarn-beta-slow": (["1"], {"engine.yarn_beta_slow": 1.0}),
    "--yarn-beta-fast": (["32"], {"engine.yarn_beta_fast": 32.0}),
    "--strategy": (["paced:patience=4"], {"engine.strategy": "paced:patience=4"}),
    "--spec-type": (
        ["ngram-simple"],
        {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 1}},
    ),
    "--spec-default": ([], {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 1}}),
    "--speculation": (["ngram:size_n=6"], {"engine.speculation": "ngram:size_n=6"}),
    "--spec-draft-model": (["m.gguf"], _DRAFTING),
    "--spec-draft-hf": (
        ["u/d:Q8_0"],
        {"engine.draft_model": "cache/u/d:Q8_0/None/False/no token", "engine.speculation": {"name": "draft-model"}},
    ),
    "--spec-draft-p-min": (["0.5", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"p_min": 0.5}}),
    "--spec-draft-ngl": (["3", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"n_gpu_layers": 3}}),
    "--spec-draft-device": (["none", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"devices": ["CPU"]}}),
    "--spec-draft-threads": (["2", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"n_threads": 2}}),
    "--spec-draft-threads-batch": (
        ["2", "-md", "m.gguf"],
        {**_DRAFTING, "engine.draft_options": {"n_threads_batch": 2}},
    ),
    "--spec-draft-type-k": (["q8_0", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"type_k": "q8_0"}}),
    "--spec-draft-type-v": (["q8_0", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"type_v": "q8_0"}}),
    "--spec-draft-override-tensor": (
        ["a=CPU", "-md", "m.gguf"],
        {**_DRAFTING, "engine.draft_options": {"tensor_overrides": {"a": "CPU"}}},
    ),
    "--spec-draft-cpu-moe": (["-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"cpu_moe": True}}),
    "--spec-draft-n-cpu-moe": (["2", "-md", "m.gguf"], {**_DRAFTING, "engine.draft_options": {"n_cpu_moe": 2}}),
    "--spec-draft-n-max": (["16"], {"engine.max_draft": 16}),
    "--spec-draft-n-min": (["2"], {"engine.min_draft": 2}),
    "--spec-ngram-simple-size-n": (
        ["6", "--spec-type", "ngram-simple"],
        {"engine.speculation": {"name": "ngram", "size_n": 6, "size_m": 48, "min_hits": 1}},
    ),
    "--spec-ngram-simple-size-m": (
        ["16", "--spec-type", "ngram-simple"],
        {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 16, "min_hits": 1}},
    ),
    "--spec-ngram-simple-min-hits": (
        ["2", "--spec-type", "ngram-simple"],
        {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 2}},
    ),
    "--spec-ngram-map-k-size-n": (
        ["6", "--spec-type", "ngram-map-k"],
        {"engine.speculation": {"name": "ngram", "size_n": 6, "size_m": 48, "min_hits": 1}},
    ),
    "--spec-ngram-map-k-size-m": (
        ["16", "--spec-type", "ngram-map-k"],
        {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 16, "min_hits": 1}},
    ),
    "--spec-ngram-map-k-min-hits": (
        ["2", "--spec-type", "ngram-map-k"],
        {"engine.speculation": {"name": "ngram", "size_n": 12, "size_m": 48, "min_hits": 2}},
    ),
    "--itl-target-ms": (["40"], {"engine.itl_target_ms": 40.0}),
    "--max-tick-ms": (["500"], {"engine.max_tick_ms": 500.0}),
    "--chunk-size": (["128"], {"engine.chunk_size": 128}),
    "--max-queue": (["0"], {"engine.max_queue": 0}),
    "--max-queue-tokens": (["9"], {"engine.max_queue_tokens": 9}),
    "--isolation": (["thread"], {"engine.isolation": "thread"}),
    "--on-engine-death": (["fail"], {"engine.on_engine_death": "fail"}),
    "--max-restarts": (["8"], {"engine.max_restarts": 8}),
    "--hang-timeout": (["60"], {"engine.hang_timeout_s": 60.0}),
    "--instrument": (["m:A, m.n:b"], {"engine.instruments": ("m:A", "m.n:b")}),
    "--trace": (["states/t.jsonl"], {"engine.trace": Path("states/t.jsonl")}),
    "--trace-max-bytes": (["9999"], {"engine.trace_max_bytes": 9999}),
    "--load-mode": (["mmap+mlock"], {"engine.load_mode": "mmap_mlock"}),
    "--check-tensors": ([], {"engine.check_tensors": True}),
    "--kv-offload": ([], {"engine.offload_kqv": True}),
    "--op-offload": ([], {"engine.op_offload": True}),
    "--repack": ([], {"engine.use_extra_bufts": True}),
    "--packed-cache": (["packed"], {"engine.packed_cache": Path("packed")}),
    "--predict": (["7"], {"sampling.max_tokens": 7}),
    "--temp": (["0.3"], {"sampling.temperature": 0.3}),
    "--top-k": (["5"], {"sampling.top_k": 5}),
    "--top-p": (["0.5"], {"sampling.top_p": 0.5}),
    "--min-p": (["0.1"], {"sampling.min_p": 0.1}),
    "--top-nsigma": (["2"], {"sampling.top_n_sigma": 2.0}),
    "--xtc-probability": (["0.2"], {"sampling.xtc_probability": 0.2}),
    "--xtc-threshold": (["0.3"], {"sampling.xtc_threshold": 0.3}),
    "--typical": (["0.9"], {"sampling.typical_p": 0.9}),
    "--repeat-last-n": (["-1"], {"sampling.penalty_last_n": -1}),
    "--repeat-penalty": (["1.1"], {"sampling.repeat_penalty": 1.1}),
    "--presence-penalty": (["-.5"], {"sampling.presence_penalty": -0.5}),
    "--frequency-penalty": (["1e-1"], {"sampling.frequency_penalty": 0.1}),
    "--dry-multiplier": (["0.8"], {"sampling.dry_multiplier": 0.8}),
    "--dry-base": (["2"], {"sampling.dry_base": 2.0}),
    "--dry-allowed-length": (["3"], {"sampling.dry_allowed_length": 3}),
    "--dry-penalty-last-n": (["32"], {"sampling.dry_penalty_last_n": 32}),
    "--dry-sequence-breaker": ([r"\n"], {"sampling.dry_sequence_breakers": ("\n",)}),
    "--adaptive-target": (["0.5"], {"sampling.adaptive_target": 0.5}),
    "--adaptive-decay": (["0.8"], {"sampling.adaptive_decay": 0.8}),
    "--dynatemp-range": (["0.2"], {"sampling.dynatemp_range": 0.2}),
    "--dynatemp-exp": (["1.5"], {"sampling.dynatemp_exponent": 1.5}),
    "--mirostat": (["2"], {"sampling.mirostat": 2}),
    "--mirostat-lr": (["0.2"], {"sampling.mirostat_eta": 0.2}),
    "--mirostat-ent": (["4"], {"sampling.mirostat_tau": 4.0}),
    "--samplers": (["Top-K;nucleus;temp"], {"sampling.samplers": ("top_k", "top_p", "temperature")}),
    "--sampler-seq": (["kpt"], {"sampling.samplers": ("top_k", "top_p", "temperature")}),
    "--seed": (["42"], {"sampling.seed": 42}),
    "--ignore-eos": ([], {"sampling.ignore_eos": True}),
    "--disable-any-whitespace": ([], {"sampling.disable_any_whitespace": True}),
    "--logit-bias": (["15+1"], {"sampling.logit_bias": {15: 1.0}}),
    "--grammar": (['root ::= "b"'], {"sampling.grammar": 'root ::= "b"'}),
    "--grammar-file": (["g.gbnf"], {"sampling.grammar": 'root ::= "a"'}),
    "--json-schema": (["{}"], {"sampling.json_schema": "{}"}),
    "--json-schema-file": (["s.json"], {"sampling.json_schema": '{"type": "object"}'}),
    "--max-repetition": (["200"], {"sampling.max_repetition": 200}),
    "--reverse-prompt": (["x"], {"sampling.stop": ("x",)}),
    "--escape": (["-r", r"\t"], {"sampling.stop": ("\t",)}),
    "--chat-template": (["{{ x }}"], {"server.chat_template": "{{ x }}"}),
    "--chat-template-file": (["t.jinja"], {"server.chat_template": "{{ messages }}"}),
    "--chat-template-kwargs": (['{"a": 1}'], {"server.chat_template_kwargs": {"a": 1}}),
    "--reasoning": (["off"], {"server.chat_template_kwargs": {"enable_thinking": False}}),
    "--reasoning-effort": (["low"], {"server.chat_template_kwargs": {"reasoning_effort": "low"}}),
    "--reasoning-preserve": ([], {"server.chat_template_kwargs": {"preserve_reasoning": True}}),
    "--pooling": (["mean"], {"server.pooling": "mean"}),
    "--max-embedding-tokens": (["9"], {"engine.max_embedding_tokens": 9}),
    "--embd-normalize": (["-1"], {"server.embd_normalize": -1}),
    "--special": ([], {"server.special": True}),
    "--sleep-idle-seconds": (["300"], {"engine.sleep_idle_s": 300.0}),
    "--mlock": ([], {"engine.load_mode": "mmap_mlock"}),
    "--mmap": ([], {"engine.load_mode": "mmap"}),
    "--spm-infill": ([], {"server.spm_infill": True}),
    "--host": (["::1, 127.0.0.1,/run/llm.sock"], {"server.hosts": ("::1", "127.0.0.1", "/run/llm.sock")}),
    "--port": (["0"], {"server.port": 0}),
    "--alias": (["a, b"], {"server.aliases": ("a", "b")}),
    "--tags": (["a, b"], {"server.tags": ("a", "b")}),
    "--api-key": (["a,b"], {"server.api_keys": (ApiKey(secret="a"), ApiKey(secret="b"))}),
    "--api-key-file": (["keys"], {"server.api_keys": (ApiKey(secret="one:two"), ApiKey(secret="three"))}),
    "--tenant-key-file": (["tenants"], {"server.api_keys": (ApiKey(secret="one:two", tenant="acme"),)}),
    "--metrics-per-key": ([], {"server.metrics_per_key": True}),
    "--prefill-assistant": ([], {"server.prefill_assistant": True}),
    "--reasoning-format": (["none"], {"server.reasoning_format": "none"}),
    "--skip-chat-parsing": ([], {"server.skip_chat_parsing": True}),
    "--untagged-calls": ([], {"server.untagged_calls": True}),
    "--reasoning-budget": (["9"], {"server.reasoning_budget": 9}),
    "--reasoning-budget-message": (["So."], {"server.reasoning_budget_message": "So."}),
    "--ssl-key-file": (["k.pem", "--ssl-cert-file", "c.pem"], {"server.ssl_keyfile": Path("k.pem")}),
    "--ssl-cert-file": (["c.pem", "--ssl-key-file", "k.pem"], {"server.ssl_certfile": Path("c.pem")}),
    "--api-prefix": (["/llm/"], {"server.root_path": "/llm"}),
    "--allowed-hosts": (["llm.lan,*.example.org"], {"server.allowed_hosts": ("llm.lan", "*.example.org")}),
    "--cors-origins": (["http://a,https://b:1/"], {"server.cors_origins": ("http://a", "https://b:1")}),
    "--cors-methods": (["GET, POST"], {"server.cors_methods": ("GET", "POST")}),
    "--cors-headers": (["Authorization"], {"server.cors_headers": ("Authorization",)}),
    "--cors-credentials": ([], {"server.cors_credentials": True}),
    "--timeout": (["600"], {"server.body_timeout_s": 600.0}),
    "--request-timeout-s": (["9"], {"server.timeout_s": 9.0}),
    "--sse-ping-interval": (["-1"], {"server.heartbeat_s": math.inf}),
    "--max-body-bytes": (["9"], {"server.max_body_bytes": 9}),
    "--max-total-body-bytes": (["999999999"], {"server.max_total_body_bytes": 999999999}),
    "--max-header-bytes": (["4096"], {"server.max_header_bytes": 4096}),
    "--max-connections": (["9"], {"server.max_connections": 9}),
    "--keep-alive-s": (["9"], {"server.keep_alive_s": 9.0}),
    "--drain-s": (["0"], {"server.drain_s": 0.0}),
    "--embedding": ([], {"server.embeddings": True}),
    "--rerank": ([], {"server.reranking": True}),
    "--metrics": ([], {"server.metrics": True}),
    "--slots": ([], {"server.slots": True}),
    "--props": ([], {"server.props": True}),
    "--docs": ([], {"server.docs": True}),
    "--strict-fields": ([], {"server.strict_fields": True}),
    "--ui": ([], {"server.start_page": True}),
    "--path": (["states"], {"server.page_folder": Path("states")}),
    "--batches": ([], {"server.batches": True}),
    "--batch-folder": (["kept"], {"server.batch_folder": Path("kept")}),
    "--responses-store": (["20"], {"server.responses_store": 20}),
    "--responses-store-bytes": (["4096"], {"server.responses_store_bytes": 4096}),
    "--responses-store-total-bytes": (["8192"], {"server.responses_store_total_bytes": 8192}),
    "--slot-save-path": (["states"], {"engine.state_folder": "states"}),
    "--verbose": ([], {"server.log_level": "debug"}),
    "--verbosity": (["2"], {"server.log_level": "warning"}),
    "--log-level": (["error"], {"server.log_level": "error"}),
    "--log-disable": ([], {"server.log_level": "off"}),
    "--log-file": (["x.log"], {"server.log_file": Path("x.log")}),
    "--model-changed": (["refuse"], {"server.model_changed": "refuse"}),
    "--models-preset": (["p.ini"], {"server.models_preset": Path("p.ini")}),
    "--models-dir": (["models"], {"server.models_dir": Path("models")}),
    "--models-max": (["2"], {"server.models_max": 2}),
    "--models-memory": (["3"], {"server.models_memory": 3 << 20}),
    "--models-autoload": ([], {"server.models_autoload": True}),
    "--spare-worker": ([], {"server.spare_worker": True}),
    "--log-jsonl": ([], {"server.log_json": True}),
}


def setting(found: Resolved, target: str) -> Any:
    """The value of a target, for example "engine.n_ctx"."""
    place, _, name = target.partition(".")
    if place == "server":
        return getattr(found.settings, name)
    return {"engine": found.settings.engine_options, "sampling": found.settings.sampling}[place][name]
