// What llama-mtmd-cli takes from parts of llama.cpp that paceline does not build: options, console, hashes.
#include "arg.h"
#include "common.h"
#include "console.h"
#include "debug.h"
#include "log.h"

#include <cstdlib>
#include <string>

// MODEL MMPROJ MEDIA COUNT PROMPT: greedy, on one thread, with attention and cells whose sums do not depend on the batch.
bool common_params_parse(int argc, char ** argv, common_params & params, llama_example, void (*)(int, char **)) {
    if (argc != 6) {
        return false;
    }
    params.model.path    = argv[1];
    params.mmproj.path   = argv[2];
    params.image         = {argv[3]};
    params.n_predict     = std::atoi(argv[4]);
    params.prompt        = argv[5];
    params.use_jinja     = true;
    params.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    params.n_ctx         = 1024;
    params.n_batch = params.n_ubatch = 512;
    params.n_gpu_layers              = 0;
    params.fit_params = params.warmup = params.mmproj_use_gpu = false;
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1;
    params.cache_type_k = params.cache_type_v = GGML_TYPE_F32;
    params.flash_attn_type                    = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.sampling.temp                      = 0;
    return true;
}

void console::init(bool, bool) {}
void console::cleanup() {}
void console::set_display(display_type) {}
bool console::readline(std::string &, bool) { return false; }

struct common_debug_cb_user_data::impl {};
common_debug_cb_user_data::common_debug_cb_user_data() = default;
// At the end of the program, whose last words would be lost.
common_debug_cb_user_data::~common_debug_cb_user_data() { common_log_flush(common_log_main()); }
bool common_debug_cb_eval(ggml_tensor *, bool, void *) { return false; }

std::string hash_sha256_hex(const void *, size_t) { return "media"; } // the name of a file in caches, of which it has none
