# The C++ examples, build/examples/<name>: built when asked for, and with the tests.
file(GLOB example_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/examples/cpp/*.cpp)
foreach(source ${example_sources})
  cmake_path(GET source STEM example)
  list(APPEND examples ${example})
  add_executable(${example} EXCLUDE_FROM_ALL ${source})
  target_link_libraries(${example} PRIVATE shardtensor)
  set_target_properties(${example} PROPERTIES RUNTIME_OUTPUT_DIRECTORY examples)
endforeach()
