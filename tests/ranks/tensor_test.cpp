// Sharded tensors between real processes.
#include "support.h"

namespace shardtensor::testing {

namespace {

TEST(RanksRedistribute, KeepsTheTensorBetweenAllCuts) {
  const auto mesh = line();
  const auto whole = numbered({9, 7});
  std::vector<SpecPtr> specs{make_replicated(mesh, {9, 7})};
  for (const auto& cut : cuts(9, mesh->ranks())) {
    specs.push_back(
        make_spec(mesh, {9, 7}, {Placement::shard(0)}, {cut, std::nullopt}));
  }
  for (const auto& cut : cuts(7, mesh->ranks())) {
    specs.push_back(
        make_spec(mesh, {9, 7}, {Placement::shard(1)}, {std::nullopt, cut}));
  }
  for (const auto& from : specs) {
    for (const auto& to : specs) {
      const auto moved = redistribute(shard(whole, from), to);
      EXPECT_TRUE(to_local(moved).equal(piece(whole, to))) << *from << *to;
    }
  }
}

TEST(RanksRedistribute, SumsPartialTerms) {
  const auto mesh = line();
  const auto terms = make_spec(mesh, {5}, {Placement::partial()});
  const auto x = from_local(numbered({5}) * (manager().rank() + 1), terms);
  const auto ranks = static_cast<double>(mesh->ranks());
  expect_close(full_tensor(x), numbered({5}) * ranks * (ranks + 1) / 2);
}

TEST(RanksRedistribute, MovesEveryDtype) {
  const auto mesh = line();
  for (const auto dtype :
       {at::kBool,
        at::kByte,
        at::kShort,
        at::kInt,
        at::kLong,
        at::kHalf,
        at::kBFloat16,
        at::kFloat,
        at::kDouble,
        at::kComplexFloat}) {
    const auto whole = at::arange(35).reshape({7, 5}).remainder(2).to(dtype);
    const auto rows = make_spec(mesh, {7, 5}, {Placement::shard(0)});
    const auto columns =
        redistribute(shard(whole, rows), {Placement::shard(1)});
    EXPECT_TRUE(to_local(columns).equal(piece(whole, spec(columns)))) << dtype;
    EXPECT_TRUE(full_tensor(columns).equal(whole)) << dtype;
  }
}

TEST(RanksHalo, BringsNeighboursRowsAndTakesGradientsBack) {
  const auto mesh = line();
  for (const auto& cut : cuts(11, mesh->ranks())) {
    const auto layout =
        make_spec(mesh, {11, 3}, {Placement::shard(0)}, {cut, std::nullopt});
    const auto whole = numbered({11, 3});
    auto x = shard(whole, layout).requires_grad_();
    const auto local = halo_exchange(x, {{0, 2, 1}}, Boundary::Periodic);
    const auto around =
        at::cat({whole.slice(0, 9), whole, whole.slice(0, 0, 1)});
    const auto rows = layout->interval(0);
    const int64_t extent = rows.extent() + 3;
    expect_close(
        local.detach(), around.slice(0, rows.begin, rows.begin + extent));
    local.sum().backward();
    EXPECT_EQ(x.grad().sizes(), whole.sizes());
    // Each element is on as many ranks as have it among their rows.
    auto uses = at::zeros({11, 3}, at::kDouble);
    for (int64_t rank = 0; rank < mesh->ranks(); ++rank) {
      const auto owned = layout->interval(0, rank);
      for (int64_t i = owned.begin - 2; i < owned.end + 1; ++i) {
        uses[(i + 11) % 11] += 1;
      }
    }
    expect_close(full_tensor(x.grad()), uses);
  }
}

void expect_conv_like_one_device(const SpecPtr& layout) {
  const auto image = numbered(layout->sizes());
  const auto weight = numbered({4, 2, 3, 3}).requires_grad_();
  const auto bias = numbered({4}).requires_grad_();
  const auto factor = numbered({1, 4, 7, 5}).abs();
  auto x = shard(image, layout).requires_grad_();
  const auto call = [&](const at::Tensor& input) {
    return at::conv2d(input, weight, bias, {2, 2}, {1, 1});
  };
  const auto output = call(x);
  (output * factor).sum().backward();
  const auto weight_gradient = weight.grad().clone();
  const auto bias_gradient = bias.grad().clone();

  weight.mutable_grad().reset();
  bias.mutable_grad().reset();
  const auto whole = image.clone().requires_grad_();
  const auto expected = call(whole);
  (expected * factor).sum().backward();
  expect_close(full_tensor(output.detach()), expected.detach());
  expect_close(full_tensor(x.grad()), whole.grad());
  expect_close(weight_gradient, weight.grad());
  expect_close(bias_gradient, bias.grad());
}

TEST(RanksConv, EqualsOneDeviceForwardAndBackward) {
  const auto mesh = line();
  for (const auto& cut : cuts(13, mesh->ranks())) {
    expect_conv_like_one_device(make_spec(
        mesh,
        {1, 2, 13, 10},
        {Placement::shard(2)},
        {std::nullopt, std::nullopt, cut, std::nullopt}));
  }
}

TEST(RanksConv, EqualsOneDeviceOnATwoDimensionalMesh) {
  const int64_t rows = manager().world_size() % 2 == 0 ? 2 : 1;
  expect_conv_like_one_device(make_spec(
      grid(rows), {1, 2, 13, 10}, {Placement::shard(2), Placement::shard(3)}));
  // Each row of ranks has an image of its own.
  expect_conv_like_one_device(make_spec(
      manager().mesh("columns"), {1, 2, 13, 10}, {Placement::shard(2)}));
}

TEST(RanksMeshes, AnAxisMeetsTheWhole) {
  const auto mesh = grid(manager().world_size() % 2 == 0 ? 2 : 1);
  const auto axis = manager().mesh("columns");
  const auto whole = numbered({5, 6});
  const auto rows = make_spec(axis, {5, 6}, {Placement::shard(0)});
  const auto both =
      make_spec(mesh, {5, 6}, {Placement::shard(1), Placement::shard(0)});
  auto x = shard(whole, rows).requires_grad_();
  auto y = shard(whole, both).requires_grad_();
  const auto product = x * y;
  EXPECT_EQ(spec(product)->mesh(), mesh);
  expect_close(full_tensor(product.detach()), whole * whole);
  product.sum().backward();
  EXPECT_EQ(spec(x.grad()), rows);
  expect_close(full_tensor(x.grad()), whole);
  expect_close(full_tensor(y.grad()), whole);
}

TEST(RanksReductions, EqualOneDevice) {
  const auto mesh = line();
  for (const auto& cut : cuts(9, mesh->ranks())) {
    const auto layout =
        make_spec(mesh, {9, 4}, {Placement::shard(0)}, {cut, std::nullopt});
    const auto whole = numbered({9, 4});
    const auto x = shard(whole, layout);
    expect_close(full_tensor(x.sum()), whole.sum());
    expect_close(full_tensor(x.mean({0})), whole.mean({0}));
    expect_close(full_tensor(x.amax({0})), whole.amax({0}));
    expect_close(full_tensor(x.amin()), whole.amin());
    expect_close(full_tensor(x.var(0)), whole.var(0));
    expect_close(full_tensor(x.softmax(0)), whole.softmax(0));
    EXPECT_EQ(
        full_tensor(x.argmax()).item<int64_t>(),
        whole.argmax().item<int64_t>());
  }
}

// Operators whose Meta kernels PyTorch wrote in Python, and their neighbours.
TEST(RanksOperators, WorkWithoutPython) {
  const auto mesh = line();
  const auto layout = make_spec(mesh, {2, 4, 9}, {Placement::shard(2)});
  const auto whole = numbered({2, 4, 9});
  using Call = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<std::pair<const char*, Call>> calls{
      {"relu", [](auto& x) { return x.relu(); }},
      {"silu", [](auto& x) { return at::silu(x); }},
      {"gelu", [](auto& x) { return at::gelu(x); }},
      {"hardswish", [](auto& x) { return at::hardswish(x); }},
      {"leaky_relu", [](auto& x) { return at::leaky_relu(x); }},
      {"clamp", [](auto& x) { return x.clamp(-0.5, 0.5); }},
      {"where", [](auto& x) { return at::where(x > 0, x, -x); }},
      {"cat", [](auto& x) { return at::cat({x, 2 * x}, 1); }},
      {"stack", [](auto& x) { return at::stack({x, x}, 0); }},
      {"cumsum", [](auto& x) { return x.cumsum(1); }},
      {"flip", [](auto& x) { return x.flip(1); }},
      {"roll", [](auto& x) { return x.roll(1, 1); }},
      {"index_select",
       [](auto& x) { return x.index_select(1, at::tensor({2, 0})); }},
      {"gather",
       [](auto& x) { return x.gather(1, at::zeros({2, 1, 9}, at::kLong)); }},
      {"masked_fill", [](auto& x) { return x.masked_fill(x > 0, 0.5); }},
      {"permute", [](auto& x) { return x.permute({2, 0, 1}); }},
      {"linear",
       [](auto& x) { return at::linear(x, at::ones({3, 9}, at::kDouble)); }},
      {"matmul", [](auto& x) { return x.matmul(x.transpose(1, 2)); }},
      {"group_norm", [](auto& x) { return at::group_norm(x, 2); }},
      {"avg_pool", [](auto& x) { return at::avg_pool1d(x, 3, 2, 1); }},
      {"max_pool", [](auto& x) { return at::max_pool1d(x, 3, 2, 1); }},
      {"upsample",
       [](auto& x) {
         return at::upsample_linear1d(x, at::IntArrayRef{18}, false);
       }},
      {"adaptive_pool", [](auto& x) { return at::adaptive_avg_pool1d(x, 4); }},
      {"pad", [](auto& x) { return at::constant_pad_nd(x, {1, 2}, 0.5); }},
      {"log_softmax", [](auto& x) { return x.log_softmax(1); }},
      {"mse_loss", [](auto& x) { return at::mse_loss(x, at::ones_like(x)); }},
      {"norm", [](auto& x) { return x.norm(); }},
      {"std", [](auto& x) { return x.std(1); }},
      {"sort", [](auto& x) { return std::get<0>(x.sort(1)); }},
      {"topk", [](auto& x) { return std::get<0>(x.topk(2, 1)); }},
      {"tril", [](auto& x) { return x.tril(); }},
      {"repeat", [](auto& x) { return x.repeat({1, 2, 1}); }},
      {"addcmul", [](auto& x) { return at::addcmul(x, x, x); }},
      {"pixel_shuffle",
       [](auto& x) { return at::pixel_shuffle(x.unsqueeze(2), 2); }},
  };
  set_fallback_mode(FallbackMode::Silent);
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    try {
      auto x = shard(whole, layout).requires_grad_();
      const auto reference = whole.clone().requires_grad_();
      const auto result = call(x);
      const auto expected = call(reference);
      expect_close(full_tensor(result.detach()), expected.detach());
      result.square().sum().backward();
      expected.square().sum().backward();
      expect_close(full_tensor(x.grad()), reference.grad());
    } catch (const std::exception& error) {
      ADD_FAILURE() << name << ": " << error.what();
    }
  }
}

} // namespace

} // namespace shardtensor::testing
