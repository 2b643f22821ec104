#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "context.hpp"
#include "draft_heads.hpp"
#include "error.hpp"

namespace paceline {
namespace {

ContextOptions context_options(uint32_t n_ctx, uint32_t n_batch, uint32_t n_ubatch, uint32_t n_seq_max, uint32_t n_outputs_max,
                               int32_t n_threads, int32_t n_threads_batch, int rope_scaling_type, int pooling_type,
                               int attention_type, int flash_attn, float rope_freq_base, float rope_freq_scale,
                               float yarn_ext_factor, float yarn_attn_factor, float yarn_beta_fast, float yarn_beta_slow,
                               uint32_t yarn_orig_ctx, int type_k, int type_v, bool embeddings, bool offload_kqv, bool op_offload,
                               bool swa_full, bool kv_unified, std::optional<uint64_t> max_host_bytes,
                               std::shared_ptr<Model> heads, uint32_t max_rollback, bool times_operations) {
    ContextOptions         options;
    llama_context_params & params = options.params;
    params.n_ctx                  = n_ctx;
    params.n_batch                = n_batch;
    params.n_ubatch               = n_ubatch;
    params.n_seq_max              = n_seq_max;
    params.n_outputs_max          = n_outputs_max;
    params.n_threads              = n_threads;
    params.n_threads_batch        = n_threads_batch;
    params.rope_scaling_type      = static_cast<llama_rope_scaling_type>(rope_scaling_type);
    params.pooling_type           = static_cast<enum llama_pooling_type>(pooling_type);
    params.attention_type         = static_cast<llama_attention_type>(attention_type);
    params.flash_attn_type        = static_cast<llama_flash_attn_type>(flash_attn);
    params.rope_freq_base         = rope_freq_base;
    params.rope_freq_scale        = rope_freq_scale;
    params.yarn_ext_factor        = yarn_ext_factor;
    params.yarn_attn_factor       = yarn_attn_factor;
    params.yarn_beta_fast         = yarn_beta_fast;
    params.yarn_beta_slow         = yarn_beta_slow;
    params.yarn_orig_ctx          = yarn_orig_ctx;
    params.type_k                 = static_cast<ggml_type>(type_k);
    params.type_v                 = static_cast<ggml_type>(type_v);
    params.embeddings             = embeddings;
    params.offload_kqv            = offload_kqv;
    params.op_offload             = op_offload;
    params.swa_full               = swa_full;
    params.kv_unified             = kv_unified;
    params.n_rs_seq               = max_rollback;
    options.max_host_bytes        = max_host_bytes;
    options.heads                 = std::move(heads);
    options.times_operations      = times_operations;
    return options;
}

std::shared_ptr<Context> make_context(std::shared_ptr<Model> model, const ContextOptions & options) {
    Unlocked unlocked;
    return std::make_shared<Context>(std::move(model), options);
}

void decode(Context & context, const Ints & tokens, const Ints & positions, const Ints & seq_ids, const Bytes & wants_output) {
    const auto owned_tokens = copied(tokens), owned_positions = copied(positions), owned_seq_ids = copied(seq_ids);
    const auto owned_wants = copied(wants_output);
    Unlocked   unlocked;
    context.decode({owned_tokens, owned_positions, owned_seq_ids, owned_wants});
}

using Vectors = nb::ndarray<const float, nb::numpy, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Places  = nb::ndarray<const int32_t, nb::numpy, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

// The caller's embeddings are not copied: it does not write to them.
void decode_embeddings(Context & context, int32_t seq_id, int32_t position, const Vectors & embeddings,
                       const std::optional<Places> & places, bool is_causal, int32_t scratch) {
    if (embeddings.shape(1) != static_cast<size_t>(llama_model_n_embd_inp(context.model()->get()))) {
        fail("InvalidParams", "embeddings must have " + str(llama_model_n_embd_inp(context.model()->get())) + " values each, not " +
                                  str(embeddings.shape(1)));
    }
    const std::vector<int32_t> owned = places ? copied(*places) : std::vector<int32_t>{};
    Unlocked                   unlocked;
    context.decode(EmbeddingRow{seq_id, position, as_span(embeddings), owned, is_causal, scratch});
}

nb::object embed(Context & context, const Ints & tokens, const Ints & lengths) {
    const auto         owned_tokens = copied(tokens), owned_lengths = copied(lengths);
    std::vector<float> vectors;
    {
        Unlocked unlocked;
        vectors = context.embed(owned_tokens, owned_lengths);
    }
    const size_t dimension = context.embedding_dimension();
    const size_t rows      = dimension ? vectors.size() / dimension : 0;
    return to_numpy(std::move(vectors), {rows, dimension});
}

template <std::vector<float> (Context::*read)(int32_t) const> nb::object read_row(const Context & context, int32_t index) {
    std::vector<float> row;
    {
        Unlocked unlocked;
        row = (context.*read)(index);
    }
    return to_numpy(std::move(row));
}

nb::tuple save(const Context & context, int32_t seq_id, bool partial) {
    std::pair<std::vector<uint8_t>, int32_t> saved;
    {
        Unlocked unlocked;
        saved = context.save(seq_id, partial);
    }
    return nb::make_tuple(to_numpy(std::move(saved.first)), saved.second);
}

// `state` must be an array over immutable bytes: it is too large to be copied again.
void restore(Context & context, int32_t seq_id, const Bytes & state, bool partial, int32_t last) {
    Unlocked unlocked;
    context.restore(seq_id, as_span(state), partial, last);
}

nb::object save_range(Context & context, int32_t seq_id, int32_t first, int32_t end, int32_t scratch) {
    std::vector<uint8_t> state;
    {
        Unlocked unlocked;
        state = context.save_range(seq_id, first, end, scratch);
    }
    return nb::cast(to_numpy(std::move(state)));
}

void load_range(Context & context, int32_t seq_id, const Bytes & state, int32_t saved_first, int32_t saved_end, int32_t first,
                int32_t end, int32_t scratch) {
    Unlocked unlocked;
    context.load_range(seq_id, as_span(state), {saved_first, saved_end - 1}, first, end, scratch);
}

nb::object cut_range(Context & context, const Bytes & state, int32_t saved_first, int32_t saved_end, int32_t first, int32_t end,
                     int32_t scratch) {
    std::vector<uint8_t> cut;
    {
        Unlocked unlocked;
        cut = context.cut_range(as_span(state), {saved_first, saved_end - 1}, first, end, scratch);
    }
    return nb::cast(to_numpy(std::move(cut)));
}

std::vector<std::vector<int32_t>> draft(Context & context, const std::vector<std::tuple<int32_t, int32_t, int32_t, int32_t>> & wishes,
                                        float min_probability) {
    std::vector<DraftWish> wanted;
    for (const auto & [seq_id, position, token_id, max_tokens] : wishes) {
        wanted.push_back({seq_id, position, token_id, max_tokens});
    }
    Unlocked unlocked;
    return context.draft(wanted, min_probability);
}

std::pair<int32_t, int32_t> heads_positions(const Context & context, int32_t seq_id) {
    if (!context.draft_heads()) {
        fail("Unsupported", "this context was made without draft heads");
    }
    Unlocked        unlocked;
    const Positions held = context.draft_heads()->positions(seq_id);
    return {held.min, held.max};
}

std::pair<int32_t, int32_t> positions(const Context & context, int32_t seq_id) {
    Unlocked        unlocked;
    const Positions held = context.positions(seq_id);
    return {held.min, held.max};
}

void bind_memory(nb::class_<Context> & type) {
    const nb::call_guard<Unlocked> unlocked;
    type.def("positions", &positions, nb::arg("seq_id"))
        .def("remove", &Context::remove, nb::arg("seq_id"), nb::arg("first"), unlocked)
        .def("copy", &Context::copy, nb::arg("from_seq_id"), nb::arg("to_seq_id"), nb::arg("first"), nb::arg("end"), unlocked)
        .def("copy_cells", &Context::copy_cells, nb::arg("from_seq_id"), nb::arg("to_seq_id"), nb::arg("end"), unlocked)
        .def("keep", &Context::keep, nb::arg("seq_id"), unlocked)
        .def("clear", &Context::clear, nb::arg("data"), unlocked)
        .def("save", &save, nb::arg("seq_id"), nb::arg("partial"))
        .def("save_range", &save_range, nb::arg("seq_id"), nb::arg("first"), nb::arg("end"), nb::arg("scratch"))
        .def("load_range", &load_range, nb::arg("seq_id"), nb::arg("state").noconvert(), nb::arg("saved_first"),
             nb::arg("saved_end"), nb::arg("first"), nb::arg("end"), nb::arg("scratch"))
        .def("cut_range", &cut_range, nb::arg("state").noconvert(), nb::arg("saved_first"), nb::arg("saved_end"),
             nb::arg("first"), nb::arg("end"), nb::arg("scratch"))
        .def("restore", &restore, nb::arg("seq_id"), nb::arg("state").noconvert(), nb::arg("partial"), nb::arg("last"));
}

void bind_passes(nb::class_<Context> & type) {
    type.def("decode", &decode, nb::arg("token_ids").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("seq_ids").noconvert(), nb::arg("wants_output").noconvert())
        .def("decode_embeddings", &decode_embeddings, nb::arg("seq_id"), nb::arg("position"), nb::arg("embeddings").noconvert(),
             nb::arg("places").noconvert().none(), nb::arg("is_causal"), nb::arg("scratch"))
        .def(
            "encode",
            [](Context & context, const Ints & tokens) {
                const auto owned = copied(tokens);
                Unlocked   unlocked;
                context.encode(owned);
            },
            nb::arg("token_ids").noconvert())
        .def("embed", &embed, nb::arg("token_ids").noconvert(), nb::arg("lengths").noconvert())
        .def("logits", &read_row<&Context::logits>, nb::arg("index"))
        .def("embeddings", &read_row<&Context::embeddings>, nb::arg("index"))
        .def("pooled", &read_row<&Context::pooled>, nb::arg("seq_id"))
        .def("draft", &draft, nb::arg("wishes"), nb::arg("min_probability"),
             "Wishes are (seq_id, position, token_id, max_tokens).")
        .def("heads_positions", &heads_positions, nb::arg("seq_id"))
        .def("abort", &Context::abort);
}

} // namespace

void bind_context(nb::module_ & m) {
    nb::class_<Context> type(m, "Context");
    nb::class_<ContextOptions>(m, "ContextOptions")
        .def(nb::new_(&context_options), nb::arg("n_ctx"), nb::arg("n_batch"), nb::arg("n_ubatch"),
             nb::arg("n_seq_max"), nb::arg("n_outputs_max"), nb::arg("n_threads"), nb::arg("n_threads_batch"),
             nb::arg("rope_scaling_type"), nb::arg("pooling_type"), nb::arg("attention_type"), nb::arg("flash_attn"),
             nb::arg("rope_freq_base"), nb::arg("rope_freq_scale"), nb::arg("yarn_ext_factor"), nb::arg("yarn_attn_factor"),
             nb::arg("yarn_beta_fast"), nb::arg("yarn_beta_slow"), nb::arg("yarn_orig_ctx"), nb::arg("type_k"),
             nb::arg("type_v"), nb::arg("embeddings"), nb::arg("offload_kqv"), nb::arg("op_offload"), nb::arg("swa_full"),
             nb::arg("kv_unified"), nb::arg("max_host_bytes").none(), nb::arg("heads").none() = nb::none(),
             nb::arg("max_rollback") = 0, nb::arg("times_operations") = false);
    nb::class_<OperationTime>(m, "OperationTime")
        .def_ro("operation", &OperationTime::operation)
        .def_ro("name", &OperationTime::name)
        .def_ro("type", &OperationTime::type)
        .def_ro("num_times", &OperationTime::num_times)
        .def_ro("seconds", &OperationTime::seconds)
        .def_ro("bytes", &OperationTime::bytes)
        .def_ro("products", &OperationTime::products);
    nb::class_<BufferUse>(m, "BufferUse")
        .def_ro("buffer", &BufferUse::buffer)
        .def_ro("device", &BufferUse::device)
        .def_ro("is_host", &BufferUse::is_host)
        .def_ro("weights", &BufferUse::weights)
        .def_ro("cache", &BufferUse::cache)
        .def_ro("compute", &BufferUse::compute);
    m.def("plan_context", &Context::plan, nb::arg("model"), nb::arg("options"), nb::call_guard<Unlocked>());
    type.def(nb::new_(&make_context), nb::arg("model"), nb::arg("options"));
    type.def("memory_use", &Context::memory_use);
    type.def("operation_times", &Context::operation_times, nb::call_guard<Unlocked>());
    type.def_prop_ro("model", &Context::model)
        .def_prop_ro("n_ctx", &Context::n_ctx)
        .def_prop_ro("max_positions", &Context::max_positions)
        .def_prop_ro("n_batch", &Context::n_batch)
        .def_prop_ro("max_rollback", &Context::max_rollback)
        .def_prop_ro("n_ubatch", &Context::n_ubatch)
        .def_prop_ro("n_seq_max", &Context::n_seq_max)
        .def_prop_ro("n_outputs_max", &Context::n_outputs_max)
        .def_prop_ro("kv_unified", &Context::kv_unified)
        .def_prop_ro("has_state_apart", &Context::has_state_apart)
        .def_prop_ro("memory_class", [](const Context & context) { return memory_class_name(context.memory_class()); })
        .def_prop_ro("pooling_type", [](const Context & context) { return static_cast<int>(context.pooling_type()); })
        .def_prop_ro("embedding_dimension", &Context::embedding_dimension)
        .def_prop_ro("embeds_in_pieces", &Context::embeds_in_pieces)
        .def_prop_ro("threads", &Context::threads)
        .def("set_threads", &Context::set_threads, nb::arg("n_threads"), nb::arg("n_threads_batch"), nb::call_guard<Unlocked>())
        .def("set_adapters", &Context::set_adapters, nb::arg("adapters"), nb::call_guard<Unlocked>());
    bind_passes(type);
    bind_memory(type);
}

} // namespace paceline
