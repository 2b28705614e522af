# What the extension module and the libraries of kernels share.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_SKIP_RPATH ON)  # torch has loaded what they need
set(CMAKE_BUILD_TYPE Release)
if("$ENV{DEBUG}")
  set(CMAKE_BUILD_TYPE Debug)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
include_directories(${root}/csrc/include ${PROJECT_SOURCE_DIR})
foreach(warning IN ITEMS -Wall -Wextra -Wno-missing-field-initializers)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:${warning}>)
endforeach()

# Each tells its version and a hash of the headers that all share, which are checked on loading.
file(STRINGS ${root}/amp_ext/__init__.py version REGEX "^__version__ = ")
string(REGEX MATCH "\".*\"" version "${version}")
file(GLOB_RECURSE headers ${root}/csrc/include/*.h)
foreach(header IN LISTS headers)
  file(SHA256 ${header} hash)
  string(APPEND hashes ${hash})
endforeach()
string(SHA256 abi "${hashes}")
string(SUBSTRING ${abi} 0 16 abi)
set(identity AMP_EXT_VERSION=${version} AMP_EXT_ABI="${abi}")

# A library of kernels exports one symbol and lacks none.
function(link_as_backend target)
  target_link_options(${target} PRIVATE -Wl,--version-script=${root}/csrc/library.map -Wl,-z,defs)
endfunction()
