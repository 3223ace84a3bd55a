// The stop rule as arguments of an op. Every number is an argument of its own, because a list costs the dispatcher two
// microseconds per call.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "monitor.h"

namespace deqfast {

// `Flat<&f>::Op::call` is `f` with the numbers of the rule in place of its one argument of type RuleNumbers.
template <auto function, class = decltype(function)>
struct Flat;

template <auto function, class Result, class... Arguments>
struct Flat<function, Result (*)(Arguments...)> {
  static constexpr bool kIsRule[] = {std::is_same_v<Arguments, RuleNumbers>...};
  static constexpr size_t position_of_rule() {
    size_t i = 0;
    while (!kIsRule[i]) ++i;
    return i;
  }
  static constexpr size_t kRule = position_of_rule();

  template <size_t I>
  using Argument = std::tuple_element_t<I, std::tuple<Arguments...>>;
  template <size_t>
  using Number = double;

  template <class Before, class Numbers, class After>
  struct Spread;
  template <size_t... B, size_t... N, size_t... A>
  struct Spread<std::index_sequence<B...>, std::index_sequence<N...>, std::index_sequence<A...>> {
    static Result call(Argument<B>... before, Number<N>... numbers, Argument<kRule + 1 + A>... after) {
      return function(std::move(before)..., RuleNumbers{numbers...}, std::move(after)...);
    }
  };

  using Op = Spread<std::make_index_sequence<kRule>, std::make_index_sequence<sizeof(RuleNumbers) / sizeof(double)>,
                    std::make_index_sequence<sizeof...(Arguments) - kRule - 1>>;
};

}  // namespace deqfast
