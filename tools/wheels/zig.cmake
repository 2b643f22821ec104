# Toolchain file of build_wheels.py: Zig's C and C++ compilers, for the processor and the C library in the environment.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "$ENV{PACELINE_ZIG_PROCESSOR}")
set(CMAKE_C_COMPILER "$ENV{PACELINE_ZIG_TOOLS}/cc")
set(CMAKE_CXX_COMPILER "$ENV{PACELINE_ZIG_TOOLS}/c++")
set(CMAKE_AR "$ENV{PACELINE_ZIG_TOOLS}/ar" CACHE FILEPATH "")
set(CMAKE_RANLIB "$ENV{PACELINE_ZIG_TOOLS}/ranlib" CACHE FILEPATH "")
