// The neural-collapse ops and their arguments: rows of features, class after class. A device runs the kernels.
// deqfast/ops/collapse/__init__.py explains the arguments.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "checks.h"

namespace deqfast {

template <class H>
struct Grouped {
  const H* features;       // (N, D), `stride` elements from row to row
  const int64_t* rows;     // (M,): rows of `features`
  const int64_t* offsets;  // (K + 1,): class k has rows[offsets[k]] up to rows[offsets[k + 1]]
  int64_t stride, dim, count, classes;

  DEQFAST_HD const H* row(int64_t i) const { return features + rows[i] * stride; }

  // The class of the i-th of the grouped rows: the last class that begins at or before i.
  DEQFAST_HD int64_t class_of(int64_t i) const {
    int64_t low = 0, high = classes - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (offsets[middle] <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

// Sums over classes are formed by chunks of kChunkRows grouped rows, of any classes. The part of class k in chunk c
// goes to slot c + k. From one part to the next, c or k grows, so that no two parts share a slot.
inline int64_t chunks_of(int64_t count) { return (count + kChunkRows - 1) / kChunkRows; }

inline Checker grouped_checker(const char* op, const Tensor& features, const Tensor& rows, const Tensor& offsets) {
  const Checker checker{op, features, "features"};
  const auto dtype = features.scalar_type();
  STD_TORCH_CHECK(features.dim() == 2 && features.size(1) > 0, op, ": `features` must have shape (N, D), D at least 1, ",
                  "got ", shape_text(features.sizes()));
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float ||
                      dtype == ScalarType::Double,
                  op, ": `features` must be float16, bfloat16, float32 or float64, got ",
                  torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(features.size(1) == 1 || features.stride(1) == 1, op,
                  ": `features` must have rows without gaps, got strides ", shape_text(features.strides()));
  STD_TORCH_CHECK(offsets.dim() == 1 && offsets.size(0) >= 2, op,
                  ": `offsets` must have shape (K + 1), K at least 1, got ", shape_text(offsets.sizes()));
  STD_TORCH_CHECK(rows.dim() == 1, op, ": `rows` must have shape (M), got ", shape_text(rows.sizes()));
  checker.elements({features.size(0), features.size(1)});
  checker.elements({rows.size(0), features.size(1)});
  checker.check("rows", rows, {rows.size(0)}, ScalarType::Long);
  checker.check("offsets", offsets, {offsets.size(0)}, ScalarType::Long);
  return checker;
}

inline void check_projection(const Checker& checker, const Tensor& means, const Tensor& directions, int64_t classes) {
  const int64_t dim = checker.like.size(1);
  checker.check("means", means, {classes, dim}, ScalarType::Double);
  STD_TORCH_CHECK(directions.dim() == 2, checker.op, ": `directions` must have shape (", dim, ", R), got ",
                  shape_text(directions.sizes()));
  checker.check("directions", directions, {dim, directions.size(1)}, ScalarType::Double);
}

template <class H>
Grouped<H> grouped_of(const Tensor& features, const Tensor& rows, const Tensor& offsets) {
  return {static_cast<const H*>(features.data_ptr()), rows.const_data_ptr<int64_t>(),
          offsets.const_data_ptr<int64_t>(), features.stride(0), features.size(1), rows.size(0), offsets.size(0) - 1};
}

// Call `body` with a zero of the features' type; for the 16-bit types, of the device's own type.
template <class Half, class BFloat16, class F>
void dispatch_features(ScalarType dtype, const F& body) {
  if (dtype == ScalarType::Half) {
    body(Half());
  } else if (dtype == ScalarType::BFloat16) {
    body(BFloat16());
  } else if (dtype == ScalarType::Float) {
    body(float());
  } else {
    body(double());
  }
}

template <class Device>
std::tuple<Tensor, Tensor> class_means(Tensor features, Tensor rows, Tensor offsets) {
  grouped_checker("class_means", features, rows, offsets);
  Device::check_values("class_means", features, rows, offsets);
  const int64_t dim = features.size(1), classes = offsets.size(0) - 1;
  Tensor local = torch::stable::new_zeros(features, {classes, dim}, ScalarType::Double);
  Tensor shift = torch::stable::new_zeros(features, {dim}, ScalarType::Double);
  if (rows.size(0) == 0) return {local, shift};
  dispatch_features<typename Device::Half, typename Device::BFloat16>(features.scalar_type(), [&](auto zero) {
    Device::means(grouped_of<decltype(zero)>(features, rows, offsets), local.mutable_data_ptr<double>(),
                  shift.mutable_data_ptr<double>(), features);
  });
  return {local, shift};
}

template <class Device>
Tensor within_class_scatter(Tensor features, Tensor rows, Tensor offsets, Tensor means, Tensor directions) {
  const Checker checker = grouped_checker("within_class_scatter", features, rows, offsets);
  check_projection(checker, means, directions, offsets.size(0) - 1);
  checker.elements({rows.size(0), directions.size(1)});
  Device::check_values("within_class_scatter", features, rows, offsets);
  const int64_t count = directions.size(1);
  Tensor within = torch::stable::new_zeros(features, {count}, ScalarType::Double);
  if (rows.size(0) == 0 || count == 0) return within;
  dispatch_features<typename Device::Half, typename Device::BFloat16>(features.scalar_type(), [&](auto zero) {
    Device::scatter(grouped_of<decltype(zero)>(features, rows, offsets), means.const_data_ptr<double>(),
                    directions.const_data_ptr<double>(), count, within.mutable_data_ptr<double>(), features);
  });
  return within;
}

}  // namespace deqfast
