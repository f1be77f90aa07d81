#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "lowpeak/host/block.hpp"

/// The part of DLPack's C structures (github.com/dmlc/dlpack, version 1.0) that a block of bytes
/// needs. Their layout is the protocol; the names are ours.
namespace dlpack {

namespace py = pybind11;

struct Device {
  std::int32_t type = 1;  // kDLCPU: what every consumer takes
  std::int32_t id = 0;
};

struct DataType {
  std::uint8_t code = 1;  // kDLUInt
  std::uint8_t bits = 8;
  std::uint16_t lanes = 1;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct Managed {
  static constexpr const char* name = "dltensor";
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {
  static constexpr const char* name = "dltensor_versioned";
  std::uint32_t major = 1;
  std::uint32_t minor = 0;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags = 0;  // writable, not a copy
  Tensor tensor;
};

/// A structure of the protocol together with what keeps its memory alive.
template <typename Structure>
struct Export {
  Structure structure{};
  std::int64_t shape;
  std::int64_t stride = 1;
  std::shared_ptr<lowpeak::host::Block> block;
};

template <typename Structure>
void delete_export(Structure* structure) {
  delete static_cast<Export<Structure>*>(structure->context);
}

/// A capsule that owns the export until a consumer renames it.
template <typename Structure>
py::capsule exported(const std::shared_ptr<lowpeak::host::Block>& block) {
  auto owned = std::make_unique<Export<Structure>>();
  owned->shape = static_cast<std::int64_t>(block->nbytes());
  owned->block = block;
  owned->structure.tensor = {block->data(), {}, 1, {}, &owned->shape, &owned->stride, 0};
  owned->structure.context = owned.get();
  owned->structure.deleter = &delete_export<Structure>;
  PyObject* capsule = PyCapsule_New(&owned->structure, Structure::name, [](PyObject* self) {
    if (PyCapsule_IsValid(self, Structure::name) == 0) return;  // a consumer has it
    auto* left = static_cast<Structure*>(PyCapsule_GetPointer(self, Structure::name));
    left->deleter(left);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(owned.release());
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace dlpack
