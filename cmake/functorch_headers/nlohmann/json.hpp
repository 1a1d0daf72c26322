// What torch's header of functorch's levels mentions of a library whose headers torch
// does not ship. Nothing of it is called here.
#pragma once

#include <string>

namespace nlohmann {

struct json {
  json() = default;
  template <class T>
  explicit json(const T&);
  static json parse(const std::string&);
  std::string dump() const;
  template <class T>
  T get() const;
};

} // namespace nlohmann
