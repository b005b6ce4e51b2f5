// SPDX-License-Identifier: Apache-2.0
//
// Streams of another device, and addresses that are not in the device's memory: a status, and no
// error of CUDA's is left behind. Streams need a machine of two GPUs.
#include <cuda.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/expand_pages.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "crumb/cuda/transfer.h"
#include "cuda/gpu/driver_function.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {
namespace {

using testing::HasSubstr;

using ForeignHandlesGpuTest = GpuFixture<testing::Test>;

// Parameters that validate; no kernel ever runs with them.
class Parameters {
 public:
  DeviceHeads heads() const {
    return {.num_layers = 1, .num_kv_heads = 1, .head_dim = 64, .records = memory_};
  }
  DevicePageTable table() const { return {.pages = At<const std::byte* const*>(), .stride = 1}; }
  SplitDecodeParams Split() const {
    SplitDecodeParams params;
    params.num_sequences = 1;
    params.num_query_heads = 1;
    params.num_kv_heads = 1;
    params.head_dim = 64;
    params.scale = 1;
    params.queries = memory_;
    params.out = At<void*>();
    params.history = table();
    params.history_pages = At<const uint32_t*>();
    params.windows = table();
    params.window_tokens = At<const uint32_t*>();
    params.workspace = At<void*>();
    params.workspace_bytes = size_t{1} << 30;
    return params;
  }
  SharedDecodeParams Shared() const {
    return {.batch = Split(), .prefix = table(), .prefix_pages = At<const uint32_t*>()};
  }
  PrefillAttentionParams Prefill() const {
    PrefillAttentionParams params;
    params.num_queries = params.num_query_heads = params.num_kv_heads = 1;
    params.head_dim = 64;
    params.scale = 1;
    params.queries = memory_;
    params.out = At<void*>();
    params.windows = table();
    params.window_tokens = 1;
    params.null_pages = At<uint64_t*>();
    return params;
  }
  AppendRowsParams Append() const {
    AppendRowsParams params;
    params.heads = heads();
    params.num_kv_heads = 1;
    params.num_tokens = 1;
    params.keys = params.values = {.data = memory_, .token_stride = 128};
    params.pages = At<std::byte* const*>();
    params.num_sequences = 1;
    params.stride = 1;
    params.slots = At<const uint32_t*>();
    params.tokens_left_out = At<uint64_t*>();
    return params;
  }
  DemotePagesParams Demote() const {
    DemotePagesParams params;
    params.heads = heads();
    params.num_layers = params.num_heads = params.num_pages = 1;
    params.keys = params.values = {.pages = At<const std::byte* const*>(), .token_stride = 128};
    params.int2 = {.pages = At<std::byte* const*>()};
    params.finding = At<uint64_t*>();
    return params;
  }
  ExpandPagesParams Expand() const {
    ExpandPagesParams params;
    params.heads = heads();
    params.num_layers = params.num_heads = params.num_pages = 1;
    params.int2 = {.pages = At<const std::byte* const*>()};
    params.keys = params.values = {.layers = At<std::byte* const*>(), .token_stride = 128};
    params.num_tokens = kPageTokens;
    params.block_table = At<const int32_t*>();
    params.block_tokens = kPageTokens;
    params.num_blocks = 1;
    params.rows_left_out = At<uint64_t*>();
    return params;
  }
  ChecksumPagesParams Checksum() const {
    return {.num_pages = 1,
            .num_ranges = 1,
            .pages = At<const std::byte* const*>(),
            .range_bytes = 512,
            .checksums = At<uint32_t*>()};
  }

 private:
  template <typename Pointer>
  Pointer At() const {
    return reinterpret_cast<Pointer>(memory_);
  }
  const DeviceBuffer<std::byte> buffer_{4096};
  std::byte* const memory_ = buffer_.data();
};

void ExpectRefusedByEveryOp(const Parameters& parameters, GpuStream stream) {
  const std::vector<std::pair<const char*, absl::Status>> refused = {
      {"split_decode", SplitDecode(parameters.Split(), stream)},
      {"shared_decode", SharedDecode(parameters.Shared(), stream)},
      {"prefill_attention", PrefillAttention(parameters.Prefill(), stream)},
      {"append_rows", AppendRows(parameters.Append(), stream)},
      {"demote_pages", DemotePages(parameters.Demote(), stream)},
      {"expand_pages", ExpandPages(parameters.Expand(), stream)},
      {"checksum_pages", ChecksumPages(parameters.Checksum(), stream)},
      {"split_decode's problem", TakeSplitDecodeProblem(parameters.Split(), stream)},
      {"prefill_attention's problem", TakePrefillAttentionProblem(parameters.Prefill(), stream)},
      {"append_rows's problem", TakeAppendRowsProblem(parameters.Append(), stream)},
      {"demote_pages's problem", TakeDemotePagesProblem(parameters.Demote(), stream)},
      {"expand_pages's problem", TakeExpandPagesProblem(parameters.Expand(), stream)},
  };
  for (const auto& [op, status] : refused) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << op << ": " << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("the stream is of GPU 1 and the current GPU is 0"))
        << op;
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(ForeignHandlesGpuTest, StreamOfAnotherDeviceIsRefusedByEveryOpCapturedOrNot) {
  int num_devices = 0;
  CRUMB_EXPECT_CUDA(cudaGetDeviceCount(&num_devices));
  if (num_devices < 2) {
    GTEST_SKIP() << "needs two GPUs, there is " << num_devices;
  }
  CRUMB_EXPECT_CUDA(cudaSetDevice(1));
  const TestStream other;
  CRUMB_EXPECT_CUDA(cudaSetDevice(0));
  const Parameters parameters;
  ExpectRefusedByEveryOp(parameters, other.get());
  other.Wait();

  CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(other.get(), cudaStreamCaptureModeThreadLocal));
  ExpectRefusedByEveryOp(parameters, other.get());
  cudaGraph_t graph = nullptr;
  CRUMB_EXPECT_CUDA(cudaStreamEndCapture(other.get(), &graph));
  size_t num_nodes = 1;
  CRUMB_EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &num_nodes));
  EXPECT_EQ(num_nodes, 0U);
  CRUMB_EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(ForeignHandlesGpuTest, AddressThatIsNotInTheDevicesMemoryIsNamed) {
  constexpr size_t kBytes = 4096;
  const DeviceBuffer<std::byte> device(kBytes);
  EXPECT_TRUE(CheckIsGpuMemory(device.data(), kBytes).ok());
  EXPECT_TRUE(CheckIsGpuMemory(device.data() + 100, kBytes - 100).ok());
  const auto expect_refused = [](const std::byte* data, size_t bytes) {
    const absl::Status status = CheckIsGpuMemory(data, bytes);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("in no memory of a GPU"));
  };
  const std::vector<std::byte> host(kBytes);
  expect_refused(host.data(), kBytes);
  expect_refused(nullptr, kBytes);
  const auto pinned = OwnPinnedMemory::Create(kBytes);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  expect_refused((*pinned)->data(), kBytes);
  expect_refused(device.data(), size_t{1} << 46);  // Its end is in nothing.
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Memory at an address of the caller's choice.
class MappedAt {
 public:
  MappedAt(CUdeviceptr address, size_t bytes) : address_(address), bytes_(bytes) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemGenericAllocationHandle allocation = 0;
    decltype(&cuMemCreate) create = nullptr;
    decltype(&cuMemMap) map = nullptr;
    decltype(&cuMemRelease) release = nullptr;
    decltype(&cuMemSetAccess) set_access = nullptr;
    EXPECT_TRUE(gpu::FindDriverFunction("cuMemCreate", &create) &&
                gpu::FindDriverFunction("cuMemMap", &map) &&
                gpu::FindDriverFunction("cuMemRelease", &release) &&
                gpu::FindDriverFunction("cuMemSetAccess", &set_access));
    EXPECT_EQ(create(&allocation, bytes, &properties, 0), CUDA_SUCCESS);
    EXPECT_EQ(map(address, bytes, 0, allocation, 0), CUDA_SUCCESS);
    EXPECT_EQ(release(allocation), CUDA_SUCCESS);
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    EXPECT_EQ(set_access(address, bytes, &access, 1), CUDA_SUCCESS);
  }
  ~MappedAt() {
    decltype(&cuMemUnmap) unmap = nullptr;
    EXPECT_TRUE(gpu::FindDriverFunction("cuMemUnmap", &unmap));
    EXPECT_EQ(unmap(address_, bytes_), CUDA_SUCCESS);
  }
  MappedAt(const MappedAt&) = delete;
  MappedAt& operator=(const MappedAt&) = delete;

 private:
  const CUdeviceptr address_;
  const size_t bytes_;
};

// A page that runs over the end of its allocation, to an allocation that is not its neighbour.
TEST_F(ForeignHandlesGpuTest, RangeWithAHoleIsNotInTheDevicesMemory) {
  constexpr size_t kUnit = size_t{2} << 20;
  CRUMB_EXPECT_CUDA(cudaFree(nullptr));
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  ASSERT_TRUE(gpu::FindDriverFunction("cuMemAddressReserve", &reserve) &&
              gpu::FindDriverFunction("cuMemAddressFree", &free_address));
  CUdeviceptr address = 0;
  ASSERT_EQ(reserve(&address, 4 * kUnit, 0, 0, 0), CUDA_SUCCESS);
  {
    const MappedAt first(address, 2 * kUnit);
    const MappedAt last(address + 3 * kUnit, kUnit);
    const auto* const data = reinterpret_cast<const std::byte*>(address);
    EXPECT_TRUE(CheckIsGpuMemory(data + 100, 2 * kUnit - 100).ok());
    EXPECT_TRUE(CheckIsGpuMemory(data + 3 * kUnit, kUnit).ok());
    const absl::Status status = CheckIsGpuMemory(data + 100, 4 * kUnit - 200);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("address " + std::to_string(address + 2 * kUnit)));
  }
  EXPECT_EQ(free_address(address, 4 * kUnit), CUDA_SUCCESS);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace crumb
