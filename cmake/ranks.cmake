# Tests of several processes and of examples, run by ctest under mpirun.
if(NOT MPI_CXX_FOUND)
  message(NOTICE "No MPI: C++ tests with ranks are left out")
  return()
endif()
file(GLOB rank_test_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/ranks/*_test.cpp)
add_executable(shardtensor_rank_tests tests/ranks/main.cpp ${rank_test_sources})
target_link_libraries(shardtensor_rank_tests PRIVATE shardtensor GTest::gtest)
add_executable(shardtensor_failures tests/ranks/failures.cpp)
target_link_libraries(shardtensor_failures PRIVATE shardtensor)
foreach(program shardtensor_failures shardtensor_rank_tests ${examples})
  set_target_properties(${program} PROPERTIES EXCLUDE_FROM_ALL OFF)
  target_compile_options(${program} PRIVATE -Wall -Wextra -O0) # compiles faster
  add_dependencies(${program} shardtensor_mpi)
  if(NOT program STREQUAL shardtensor_failures)
    precompile(${program} REUSE_FROM shardtensor_failures)
  endif()
endforeach()
precompile(shardtensor_failures PRIVATE <ATen/ATen.h> <shardtensor/shardtensor.h>)

# A port per build folder, so that checkouts side by side do not meet.
string(MD5 port_hash ${PROJECT_BINARY_DIR})
string(SUBSTRING ${port_hash} 0 3 port_hash)
math(EXPR port "21000 + 0x${port_hash}")
set(rank_environment OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  OMP_NUM_THREADS=1 MASTER_PORT=${port})
set(mpirun ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none)

# add_rank_test(<name> <ranks> COMMAND <command> [ENVIRONMENT A=1 ...] [MPIRUN <options>]
#   [PROPERTIES <ctest properties>])
function(add_rank_test name ranks)
  cmake_parse_arguments(PARSE_ARGV 2 test "" "" "COMMAND;ENVIRONMENT;MPIRUN;PROPERTIES")
  add_test(NAME ${name} COMMAND ${mpirun} ${test_MPIRUN} -n ${ranks} ${test_COMMAND})
  set_tests_properties(${name} PROPERTIES TIMEOUT 180 PROCESSORS ${ranks}
    ENVIRONMENT "${rank_environment};${test_ENVIRONMENT}" ${test_PROPERTIES})
endfunction()

# RanksPeers: tests of two ranks or more; MpiPeers: those over MPI.
add_rank_test(ranks_mpi_1 1
  COMMAND shardtensor_rank_tests --gtest_brief=1 --gtest_filter=-*Peers.*)
foreach(ranks 2 3 4)
  add_rank_test(ranks_mpi_${ranks} ${ranks} COMMAND shardtensor_rank_tests --gtest_brief=1)
endforeach()
set_property(TEST ranks_mpi_3 PROPERTY LABELS tail) # 2 and 4 ranks run the same tests
add_rank_test(ranks_gloo_2 2
  COMMAND shardtensor_rank_tests --gtest_brief=1 --gtest_filter=-MpiPeers.*
  ENVIRONMENT SHARDTENSOR_DISTRIBUTED_BACKEND=gloo PROPERTIES RESOURCE_LOCK port)

# What a rank must say. By itself mpirun ends all ranks when one dies.
set(failing "in the test's sum failed on rank 0 of 2 in group 'world': mpi:")
add_rank_test(ranks_name_a_rank_that_dies 2
  MPIRUN --runtime-options error-nonzero-status=false
  COMMAND shardtensor_failures dies ENVIRONMENT SHARDTENSOR_DISTRIBUTED_TIMEOUT=5
  PROPERTIES PASS_REGULAR_EXPRESSION "rank 0 got: .* ${failing}")
foreach(way sleeps differs brings_another_size)
  add_rank_test(ranks_name_a_rank_that_${way} 2
    COMMAND shardtensor_failures ${way} ENVIRONMENT SHARDTENSOR_DISTRIBUTED_TIMEOUT=4
    PROPERTIES PROCESSORS 1 # they wait
      PASS_REGULAR_EXPRESSION "rank 0 got: .* ${failing}")
endforeach()
set_property(TEST ranks_name_a_rank_that_brings_another_size
  PROPERTY PASS_REGULAR_EXPRESSION "rank 0 got: .* ${failing} not finished after 4000 ms; rank 1 of the group sent 2097152 bytes")

# Examples print what the header comment promises.
foreach(example_ranks sharded_conv=4 dot_product=2 scatter_redistribute=2)
  string(REGEX MATCH "([a-z_]+)=([0-9])" _ ${example_ranks})
  add_test(NAME example_${CMAKE_MATCH_1} COMMAND ${Python_EXECUTABLE}
    ${PROJECT_SOURCE_DIR}/tests/examples/check_output.py
    ${PROJECT_SOURCE_DIR}/examples/cpp/${CMAKE_MATCH_1}.cpp
    ${mpirun} -n ${CMAKE_MATCH_2} $<TARGET_FILE:${CMAKE_MATCH_1}>)
  set_tests_properties(example_${CMAKE_MATCH_1} PROPERTIES TIMEOUT 180
    PROCESSORS ${CMAKE_MATCH_2} ENVIRONMENT "${rank_environment}")
endforeach()
add_test(NAME example_train_unet COMMAND ${Python_EXECUTABLE}
  ${PROJECT_SOURCE_DIR}/tests/examples/train_unet.py
  ${PROJECT_BINARY_DIR}/example_train_unet ${mpirun} -n 2 $<TARGET_FILE:train_unet>)
set_tests_properties(example_train_unet PROPERTIES TIMEOUT 300 PROCESSORS 2
  ENVIRONMENT "${rank_environment};PYTHONPATH=${PROJECT_SOURCE_DIR}/python")
add_test(NAME example_train_ocean_vit COMMAND ${Python_EXECUTABLE}
  ${PROJECT_SOURCE_DIR}/tests/examples/train_ocean_vit.py
  ${PROJECT_BINARY_DIR}/example_train_ocean_vit
  ${mpirun} -n 2 $<TARGET_FILE:train_ocean_vit>)
set_tests_properties(example_train_ocean_vit PROPERTIES TIMEOUT 300 PROCESSORS 2
  ENVIRONMENT "${rank_environment};PYTHONPATH=${PROJECT_SOURCE_DIR}/python")
add_test(NAME example_predict_mesh COMMAND ${Python_EXECUTABLE}
  ${PROJECT_SOURCE_DIR}/tests/examples/predict_mesh.py
  ${PROJECT_BINARY_DIR}/example_predict_mesh ${mpirun} -n 3 $<TARGET_FILE:predict_mesh>)
set_tests_properties(example_predict_mesh PROPERTIES TIMEOUT 300 PROCESSORS 3
  ENVIRONMENT "${rank_environment};PYTHONPATH=${PROJECT_SOURCE_DIR}/python")
foreach(ranks 2 3)
  add_test(NAME example_shallow_water_${ranks} COMMAND ${Python_EXECUTABLE}
    ${PROJECT_SOURCE_DIR}/tests/examples/check_weather.py
    ${mpirun} -n ${ranks} $<TARGET_FILE:shallow_water>)
  set_tests_properties(example_shallow_water_${ranks} PROPERTIES TIMEOUT 180
    PROCESSORS ${ranks} ENVIRONMENT "${rank_environment}")
endforeach()
