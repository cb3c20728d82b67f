// Speculative decoding of one prompt without Python: the loop of models/decode.py around AOTInductor packages.
//
//   speculative_runner step.aoti.pt2 prompt.txt 256 > continuation.txt
//   speculative_runner verify.aoti.pt2 commit.aoti.pt2 prompt.txt 256 > continuation.txt

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "prompt_lookup.h"
#include "step.h"

namespace {

struct Decoded {
  std::string text;
  size_t steps = 0;
  size_t decode_steps = 0;
};

Decoded decode(SpeculativeStep& step, const std::string& prompt, size_t tokens) {
  const size_t wanted = prompt.size() + tokens, window = step.window();
  Decoded result{prompt};
  std::string& text = result.text;
  size_t committed = 0;  // tokens of the text that the pools have absorbed; always fewer than the text has
  while (text.size() < wanted) {
    // What the text has beyond the pools is prompt: one chunk of it, forced. Drafts fill what room is left.
    std::string row = text.substr(committed, window);
    const size_t forced = row.size() - 1;
    row += prompt_lookup(text, std::min(window - row.size(), wanted - text.size() - 1));
    const size_t drafts = row.size() - 1;
    row.resize(window, '\0');
    const Accepted accepted = step.step(row, drafts, forced, committed);
    const bool complete = committed + forced + 1 == text.size();
    committed += accepted.count;
    ++result.steps;
    if (complete) {
      text += accepted.tokens.substr(forced);  // what comes before repeats the prompt
      ++result.decode_steps;
    }
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 4 && argc != 5) {
    std::fprintf(stderr, "usage: %s PACKAGE PROMPT_FILE TOKENS\n       %s VERIFY COMMIT PROMPT_FILE TOKENS\n", argv[0],
                 argv[0]);
    return 2;
  }
  const std::vector<std::string> paths(argv + 1, argv + argc - 2);
  const char *prompt_file = argv[argc - 2], *count = argv[argc - 1];
  std::ifstream file(prompt_file, std::ios::binary);
  const std::string prompt{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || prompt.empty()) {
    std::fprintf(stderr, "%s: cannot be read or is empty\n", prompt_file);
    return 2;
  }
  const long tokens = std::stol(count);
  if (tokens < 1) {
    std::fprintf(stderr, "TOKENS should be at least 1, got %s\n", count);
    return 2;
  }
  // A step of the small model is too short to share between threads.
  at::set_num_threads(1);
  c10::InferenceMode inference;
  SpeculativeStep step(paths);
  const long needed = static_cast<long>(prompt.size()) + tokens + step.window();
  if (step.max_length() > 0 && needed > step.max_length()) {
    std::fprintf(stderr, "prompt, tokens and window need %ld positions, the package's pools hold %ld\n", needed,
                 static_cast<long>(step.max_length()));
    return 2;
  }
  const auto started = std::chrono::steady_clock::now();
  const Decoded decoded = decode(step, prompt, tokens);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  std::fwrite(decoded.text.data() + prompt.size(), 1, decoded.text.size() - prompt.size(), stdout);
  std::fprintf(stderr, "%ld tokens in %zu steps after %zu of the prompt, %.2f s\n", tokens, decoded.decode_steps,
               decoded.steps - decoded.decode_steps, seconds.count());
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
