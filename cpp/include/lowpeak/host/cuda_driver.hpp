#pragma once

#include "lowpeak/host/cuda_context.hpp"
#include "lowpeak/host/vendor_driver.hpp"

namespace lowpeak::host {

/// @brief Host memory by CUDA's driver API: one build serves every CUDA, and none.
///
/// The symbols are those of CUDA 7.0, whose names keep their meaning in every later driver.
struct CudaHostCalls {
  using Context = CudaContext;
  static constexpr const char* name = "cuda";
  static constexpr DynamicCall attribute = "cuDeviceGetAttribute";
  static constexpr int integrated_attribute = 18;  // CU_DEVICE_ATTRIBUTE_INTEGRATED
  static constexpr DynamicCall pci_bus_id = "cuDeviceGetPCIBusId";
  static constexpr DynamicCall register_host = {"cuMemHostRegister_v2", "cuMemHostRegister"};
  static constexpr DynamicCall unregister_host = "cuMemHostUnregister";
  static constexpr DynamicCall allocate_host = "cuMemHostAlloc";
  static constexpr DynamicCall free_host = "cuMemFreeHost";
};

using CudaDriver = VendorDriver<CudaHostCalls>;

}  // namespace lowpeak::host
