#include "bindings.hpp"

#include <string_view>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "vocab.hpp"

namespace paceline {

namespace {

nb::bytes to_bytes(const std::string & text) { return nb::bytes(text.data(), text.size()); }

nb::list as_list(const std::vector<llama_token> & tokens) {
    nb::list list;
    for (const llama_token token : tokens) {
        list.append(token);
    }
    return list;
}

nb::list encode(const Vocab & vocab, const nb::bytes & text, bool add_special, bool parse_special) {
    const std::string        copy(text.c_str(), text.size());
    std::vector<llama_token> tokens;
    {
        Unlocked unlocked;
        tokens = vocab.encode(copy, add_special, parse_special);
    }
    return as_list(tokens);
}

nb::list encode_prompt(const Vocab & vocab, const nb::bytes & text, const SpecialTokens::Spans & inputs) {
    const std::string        copy(text.c_str(), text.size());
    std::vector<llama_token> tokens;
    {
        Unlocked unlocked;
        tokens = vocab.encode_prompt(copy, inputs);
    }
    return as_list(tokens);
}

// Whether an object is bytes with this content.
bool holds(nb::handle object, std::string_view content) {
    if (!nb::isinstance<nb::bytes>(object)) {
        return false;
    }
    const auto bytes = nb::borrow<nb::bytes>(object);
    return std::string_view(bytes.c_str(), bytes.size()) == content;
}

// like: an earlier table; its objects are reused for tokens with the same bytes. Objects of a large vocabulary take 7 MB.
nb::tuple pieces(const Vocab & vocab, bool special, const nb::tuple & like) {
    PieceTable table;
    {
        Unlocked unlocked;
        table = vocab.pieces(special);
    }
    nb::list    list;
    std::size_t begin = 0, token = 0;
    for (const std::size_t end : table.ends) {
        const std::string_view content(table.bytes.data() + begin, end - begin);
        if (token < like.size() && holds(like[token], content)) {
            list.append(like[token]);
        } else {
            list.append(nb::bytes(content.data(), content.size()));
        }
        begin = end;
        token++;
    }
    return nb::tuple(list);
}

nb::list texts(const Vocab & vocab) {
    nb::list list;
    for (const std::string & text : vocab.texts()) {
        list.append(to_bytes(text));
    }
    return list;
}

} // namespace

void bind_vocab(nb::module_ & m) {
    nb::class_<Vocab>(m, "Vocab")
        .def(nb::init<std::shared_ptr<Model>>(), nb::arg("model"))
        .def_prop_ro("size", &Vocab::size)
        .def_prop_ro("type", [](const Vocab & vocab) { return static_cast<int>(vocab.type()); })
        .def_prop_ro("add_bos", &Vocab::add_bos)
        .def_prop_ro("add_eos", &Vocab::add_eos)
        .def_prop_ro("add_sep", &Vocab::add_sep)
        .def("encode", &encode, nb::arg("text"), nb::arg("add_special"), nb::arg("parse_special"))
        .def("encode_prompt", &encode_prompt, nb::arg("text"), nb::arg("inputs"))
        .def("pieces", &pieces, nb::arg("special"), nb::arg("like"))
        .def(
            "piece",
            [](const Vocab & vocab, llama_token token, bool special) { return to_bytes(vocab.piece(token, special)); },
            nb::arg("token"), nb::arg("special"))
        .def("texts", &texts)
        .def("text", [](const Vocab & vocab, llama_token token) { return to_bytes(vocab.text(token)); }, nb::arg("token"))
        .def(
            "attributes",
            [](const Vocab & vocab, llama_token token) { return static_cast<int>(vocab.attributes(token)); },
            nb::arg("token"))
        .def("score", &Vocab::score, nb::arg("token"))
        .def("is_control", &Vocab::is_control, nb::arg("token"))
        .def("eog", &Vocab::eog)
        .def("suppressed", &Vocab::suppressed)
        .def("special_tokens", &Vocab::special_tokens)
        .def_prop_ro_static("max_encode_bytes", [](nb::handle) { return TokenizerGuard::max_encode_bytes(); });
}

} // namespace paceline
