# What C++ costs: `make bench` runs it; ctest sees that it still works.
add_executable(benchmark_operators benchmarks/cpp/operators.cpp)
target_compile_options(benchmark_operators PRIVATE -Wall -Wextra)
target_link_libraries(benchmark_operators PRIVATE shardtensor)
set_target_properties(benchmark_operators PROPERTIES
  OUTPUT_NAME operators RUNTIME_OUTPUT_DIRECTORY benchmarks)
add_test(NAME benchmark_operators COMMAND benchmark_operators 1)
set_tests_properties(benchmark_operators PROPERTIES
  PASS_REGULAR_EXPRESSION "cat [|] [0-9.]+ µs [|] [0-9.]+ µs [|] [0-9.]+ [|]")
