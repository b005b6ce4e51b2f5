// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/shared_memory.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/transfer.h"
#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/driver_function.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

using gpu::FindDriverFunction;

struct Driver {
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
};

absl::StatusOr<const Driver*> GetDriver() {
  static const std::pair<Driver, bool> kFound = [] {
    Driver d;
    const bool all = FindDriverFunction("cuMemCreate", &d.create) &&
                     FindDriverFunction("cuMemRelease", &d.release) &&
                     FindDriverFunction("cuMemExportToShareableHandle", &d.export_handle) &&
                     FindDriverFunction("cuMemImportFromShareableHandle", &d.import_handle) &&
                     FindDriverFunction("cuMemAddressReserve", &d.reserve) &&
                     FindDriverFunction("cuMemAddressFree", &d.free_address) &&
                     FindDriverFunction("cuMemMap", &d.map) &&
                     FindDriverFunction("cuMemUnmap", &d.unmap) &&
                     FindDriverFunction("cuMemSetAccess", &d.set_access) &&
                     FindDriverFunction("cuMemGetAllocationGranularity", &d.granularity);
    return std::pair(d, all);
  }();
  if (!kFound.second) {
    return absl::UnavailableError(
        "the NVIDIA driver lacks virtual memory management; use one for CUDA 13");
  }
  return &kFound.first;
}

absl::Status DriverStatus(CUresult result, const std::string& what) {
  if (result == CUDA_SUCCESS) {
    return absl::OkStatus();
  }
  const std::string message =
      absl::StrCat(what, ": error ", static_cast<int>(result), " of the NVIDIA driver");
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
      return absl::ResourceExhaustedError(absl::StrCat(message, ", out of memory"));
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
      return absl::UnimplementedError(absl::StrCat(
          message, ": this device, or this container, cannot share its memory by descriptors"));
    default:
      return absl::InternalError(message);
  }
}

CUmemLocation OnDevice(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAllocationProp PropertiesOf(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location = OnDevice(device);
  return properties;
}

// The driver must have been initialised, and the context be there, before any of its functions.
absl::StatusOr<size_t> WholeUnits(const Driver& driver, int device, size_t bytes) {
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(cudaFree(nullptr), "preparing a GPU"));
  const CUmemAllocationProp properties = PropertiesOf(device);
  size_t unit = 0;
  CRUMB_RETURN_IF_ERROR(
      DriverStatus(driver.granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                   "asking a GPU for the units of its memory"));
  return (bytes + unit - 1) / unit * unit;
}

// Maps an allocation at an address of its own.
absl::StatusOr<std::byte*> MapAllocation(const Driver& driver,
                                         CUmemGenericAllocationHandle allocation,
                                         int device,
                                         size_t bytes,
                                         CUmemAccess_flags access) {
  const std::string what = absl::StrCat("mapping ", bytes, " bytes of a GPU's memory");
  CUdeviceptr address = 0;
  CRUMB_RETURN_IF_ERROR(DriverStatus(driver.reserve(&address, bytes, 0, 0, 0), what));
  if (absl::Status status = DriverStatus(driver.map(address, bytes, 0, allocation, 0), what);
      !status.ok()) {
    driver.free_address(address, bytes);
    return status;
  }
  CUmemAccessDesc description{};
  description.location = OnDevice(device);
  description.flags = access;
  if (absl::Status status = DriverStatus(driver.set_access(address, bytes, &description, 1), what);
      !status.ok()) {
    driver.unmap(address, bytes);
    driver.free_address(address, bytes);
    return status;
  }
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

absl::StatusOr<GpuUuid> GetGpuUuid(int device) {
  cudaDeviceProp properties{};
  CRUMB_RETURN_IF_ERROR(CurrentGpu().status());
  if (int count = 0; cudaGetDeviceCount(&count) == cudaSuccess && device >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("GPU ", device, ": this process sees ", count, ", numbered from 0"));
  }
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(cudaGetDeviceProperties(&properties, device),
                                        absl::StrCat("asking GPU ", device, " for its name")));
  GpuUuid uuid;
  static_assert(sizeof(properties.uuid.bytes) == sizeof(uuid));
  std::memcpy(uuid.data(), properties.uuid.bytes, sizeof(uuid));
  return uuid;
}

absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Create(int device, size_t bytes) {
  const ScopedGpu current(device);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(const Driver* const driver, GetDriver());
  CRUMB_ASSIGN_OR_RETURN(const size_t whole, WholeUnits(*driver, device, bytes));
  const CUmemAllocationProp properties = PropertiesOf(device);
  CUmemGenericAllocationHandle allocation = 0;
  CRUMB_RETURN_IF_ERROR(
      DriverStatus(driver->create(&allocation, whole, &properties, 0),
                   absl::StrCat("allocating ", whole, " bytes of a GPU's memory to be shared")));
  auto data = MapAllocation(*driver, allocation, device, whole, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  if (!data.ok()) {
    driver->release(allocation);
    return data.status();
  }
  std::unique_ptr<SharedGpuMemory> memory(new SharedGpuMemory);
  memory->data_ = *data;
  memory->bytes_ = whole;
  int fd = -1;
  absl::Status exported = DriverStatus(
      driver->export_handle(&fd, allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      "making a descriptor of a GPU's memory");
  driver->release(allocation);  // The mapping and the descriptor keep it.
  CRUMB_RETURN_IF_ERROR(exported);
  memory->fd_.reset(fd);
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(cudaMemset(*data, 0, whole), "clearing a GPU's memory"));
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(cudaDeviceSynchronize(), "clearing a GPU's memory"));
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Open(int device,
                                                                       int fd,
                                                                       size_t bytes) {
  const ScopedGpu current(device);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(const Driver* const driver, GetDriver());
  CRUMB_ASSIGN_OR_RETURN(const size_t whole, WholeUnits(*driver, device, bytes));
  CUmemGenericAllocationHandle allocation = 0;
  // The driver takes the descriptor in place of a pointer.
  const CUresult imported =
      driver->import_handle(&allocation,
                            reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),  // NOLINT
                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (imported != CUDA_SUCCESS) {
    return absl::FailedPreconditionError(absl::StrCat(
        "descriptor ", fd, " is not one of a GPU's memory that this process can map (error ",
        static_cast<int>(imported), " of the NVIDIA driver); is its owner's GPU GPU ", device,
        " here?"));
  }
  auto data = MapAllocation(*driver, allocation, device, whole, CU_MEM_ACCESS_FLAGS_PROT_READ);
  driver->release(allocation);  // The mapping keeps it.
  if (absl::IsInternal(data.status())) {
    return absl::FailedPreconditionError(absl::StrCat(data.status().message(), "; descriptor ", fd,
                                                      " is of other memory than was said"));
  }
  CRUMB_RETURN_IF_ERROR(data.status());
  std::unique_ptr<SharedGpuMemory> memory(new SharedGpuMemory);
  memory->data_ = *data;
  memory->bytes_ = whole;
  return memory;
}

SharedGpuMemory::~SharedGpuMemory() {
  const auto driver = GetDriver();
  if (data_ != nullptr && driver.ok()) {
    const auto address = reinterpret_cast<CUdeviceptr>(data_);
    (*driver)->unmap(address, bytes_);
    (*driver)->free_address(address, bytes_);
  }
}

}  // namespace crumb
