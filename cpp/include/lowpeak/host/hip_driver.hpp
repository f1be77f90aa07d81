#pragma once

#include "lowpeak/host/hip_context.hpp"
#include "lowpeak/host/vendor_driver.hpp"

namespace lowpeak::host {

/// @brief Host memory by AMD's HIP runtime.
struct HipHostCalls {
  using Context = HipContext;
  static constexpr const char* name = "hip";
  static constexpr DynamicCall attribute = "hipDeviceGetAttribute";
  static constexpr int integrated_attribute = 16;  // hipDeviceAttributeIntegrated
  static constexpr DynamicCall pci_bus_id = "hipDeviceGetPCIBusId";
  static constexpr DynamicCall register_host = "hipHostRegister";
  static constexpr DynamicCall unregister_host = "hipHostUnregister";
  static constexpr DynamicCall allocate_host = "hipHostMalloc";
  static constexpr DynamicCall free_host = "hipHostFree";
};

using HipDriver = VendorDriver<HipHostCalls>;

}  // namespace lowpeak::host
