// Groups of arguments, which an op takes one by one, because a list or an object costs the dispatcher microseconds.
#pragma once

#include <tuple>
#include <utility>

#include "monitor.h"

namespace deqfast {

// The arguments of an op that a parameter stands for: its fields, with those of a nested group, if it is a group.
template <class T>
struct FieldsOf {
  using type = std::tuple<T>;
};
template <>
struct FieldsOf<RuleNumbers> {
  using type = std::tuple<double, double, double, double, double>;
};
template <class T>
using Fields = typename FieldsOf<T>::type;

// `Flat<&f>::Op::call` is `f` with the fields of its groups in place of these.
template <auto function, class = decltype(function)>
struct Flat;

template <auto function, class Result, class... Groups>
struct Flat<function, Result (*)(Groups...)> {
  static_assert(((sizeof(Groups) == sizeof(Fields<Groups>)) && ...), "FieldsOf must list all fields");
  static constexpr size_t kSizes[] = {std::tuple_size_v<Fields<Groups>>...};
  static constexpr size_t begin(size_t group) { return group ? begin(group - 1) + kSizes[group - 1] : 0; }

  template <size_t group, class All, size_t... Field>
  static auto gathered(All& all, std::index_sequence<Field...>) {
    return std::tuple_element_t<group, std::tuple<Groups...>>{std::get<begin(group) + Field>(std::move(all))...};
  }
  template <class All, size_t... Group>
  static Result call(All all, std::index_sequence<Group...>) {
    return function(gathered<Group>(all, std::make_index_sequence<kSizes[Group]>())...);
  }

  template <class Arguments>
  struct Spread;
  template <class... Arguments>
  struct Spread<std::tuple<Arguments...>> {
    static Result call(Arguments... arguments) {
      return Flat::call(std::forward_as_tuple(std::move(arguments)...), std::index_sequence_for<Groups...>());
    }
  };
  using Op = Spread<decltype(std::tuple_cat(std::declval<Fields<Groups>>()...))>;
};

}  // namespace deqfast
