# Installs the build tree BUILD under a prefix, then configures, builds and runs
# the program beside this file against it.
set(folder ${BUILD}/installed_package)
file(REMOVE_RECURSE ${folder})

function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE failed
    OUTPUT_VARIABLE output ERROR_VARIABLE output ECHO_OUTPUT_VARIABLE)
  if(failed)
    message(FATAL_ERROR "${ARGV} failed")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${folder}/prefix)
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${folder}/build -G ${GENERATOR}
  -D CMAKE_CXX_COMPILER=${COMPILER} -D CMAKE_PREFIX_PATH=${folder}/prefix
  -D VERSION=${VERSION})
run(${CMAKE_COMMAND} --build ${folder}/build)
run(${folder}/build/app)
set(expected "shardtensor ${VERSION}: ShardSpec((1, 8, 361, 720) on Mesh(1: domain): \
Shard(dim=2) [361]), gradient Shard(dim=2)\n")
if(NOT output STREQUAL expected)
  message(FATAL_ERROR "expected ${expected}")
endif()
