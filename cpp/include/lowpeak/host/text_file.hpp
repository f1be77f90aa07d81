#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace lowpeak::host {

/// @brief The text of a file, empty where it cannot be read: procfs, sysfs and cgroups are meant.
///
/// By stdio, not by streams: an extension that holds a copy of libstdc++ beside the one that torch
/// loaded finds the other's locale facets, and reads nonsense or crashes.
inline std::string text_of_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  std::string text;
  if (file == nullptr) return text;
  char part[4096];
  while (const std::size_t nbytes = std::fread(part, 1, sizeof part, file.get())) {
    text.append(part, nbytes);
  }
  return text;
}

/// @brief Takes the first line off `text`, without its end.
inline std::string_view next_line(std::string_view& text) {
  const std::size_t end = text.find('\n');
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  return line;
}

/// @brief The number that `text` begins with, after spaces; nothing where it is a word, as "max".
template <typename Integer>
std::optional<Integer> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} ? std::optional(value) : std::nullopt;
}

}  // namespace lowpeak::host
