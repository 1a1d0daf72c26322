# What C++ costs: `make bench` runs it; ctest sees that it still works.
add_executable(benchmark_operators benchmarks/cpp/operators.cpp)
target_compile_options(benchmark_operators PRIVATE -Wall -Wextra)
target_link_libraries(benchmark_operators PRIVATE shardtensor)
set_target_properties(benchmark_operators PROPERTIES
  OUTPUT_NAME operators RUNTIME_OUTPUT_DIRECTORY benchmarks)
add_test(NAME benchmark_operators COMMAND benchmark_operators 1)
set_tests_properties(benchmark_operators PROPERTIES
  PASS_REGULAR_EXPRESSION "cat [|] [0-9.]+ µs [|] [0-9.]+ µs [|] [0-9.]+ [|]")

# It looks at what the shared library doesn't show.
add_executable(benchmark_boxes EXCLUDE_FROM_ALL benchmarks/cpp/boxes.cpp)
target_compile_options(benchmark_boxes PRIVATE -Wall -Wextra)
target_sources(benchmark_boxes PRIVATE $<TARGET_OBJECTS:shardtensor>)
foreach(usage INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS LINK_OPTIONS)
  set_property(TARGET benchmark_boxes APPEND PROPERTY ${usage}
    $<TARGET_PROPERTY:shardtensor,INTERFACE_${usage}>)
endforeach()
target_link_libraries(benchmark_boxes PRIVATE torch ${CMAKE_DL_LIBS})
set_target_properties(benchmark_boxes PROPERTIES
  OUTPUT_NAME boxes RUNTIME_OUTPUT_DIRECTORY benchmarks)
