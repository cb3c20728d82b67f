// Drafts by prompt lookup: what followed the last occurrence of the text's own ending. As models/drafting.py.
#pragma once

#include <algorithm>
#include <string>

// Up to `count` tokens that continue `text`; possibly none. The longest suffix of 16 .. 3 tokens that occurs earlier
// decides, at its most recent earlier occurrence.
inline std::string prompt_lookup(const std::string& text, size_t count) {
  constexpr size_t shortest = 3, longest = 16;
  const size_t end = text.size();
  size_t best = 0;  // where the occurrence ends; no occurrence ends at 0
  if (count == 0 || end == 0) {
    return "";
  }
  for (size_t length = shortest; length <= std::min(longest, end - 1); ++length) {
    // An occurrence of a longer suffix ends where one of every shorter suffix ends: the search only moves left.
    const size_t bound = best == 0 ? end - 1 : best;
    if (bound < length) {
      break;
    }
    const size_t start = text.rfind(text.substr(end - length), bound - length);
    if (start == std::string::npos) {
      break;
    }
    best = start + length;
  }
  return best == 0 ? "" : text.substr(best, count);
}
