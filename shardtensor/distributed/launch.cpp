#include "shardtensor/distributed/launch.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <utility>

#include <c10/util/StringUtil.h>

namespace shardtensor {

namespace {

constexpr int64_t kDefaultPort = 29500;
constexpr std::array kMethodVariables{
    "SHARDTENSOR_DISTRIBUTED_INITIALIZATION_METHOD",
    "PHYSICSNEMO_DISTRIBUTED_INITIALIZATION_METHOD"};

template <class... Text>
void check(bool right, const Text&... text) {
  if (!right) {
    throw LaunchError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        c10::str(text...));
  }
}

/// One launcher's variables, read as numbers.
class Variables {
 public:
  Variables(const char* method, const Environment& environment)
      : method_(method), environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    return environment_(name);
  }

  /// The first of these that is set.
  int64_t number(
      std::initializer_list<const char*> names,
      std::optional<int64_t> otherwise = std::nullopt) const {
    std::string tried;
    for (const auto* name : names) {
      if (const auto value = environment_(name)) {
        return parse(name, *value);
      }
      tried += (tried.empty() ? "" : " or ") + std::string(name);
    }
    check(
        otherwise.has_value(),
        method_,
        ": ",
        tried,
        " is not set; was the program started by this launcher?");
    return *otherwise;
  }

 private:
  int64_t parse(const std::string& name, const std::string& value) const {
    int64_t number = 0;
    const auto* end = value.data() + value.size();
    const auto result = std::from_chars(value.data(), end, number);
    check(
        result.ec == std::errc() && result.ptr == end && !value.empty(),
        method_,
        ": ",
        name,
        "='",
        value,
        "' is not an integer");
    return number;
  }

  const char* method_;
  const Environment& environment_;
};

// ---- one function per launcher ----------------------------------------------

Launch from_torchrun(const Environment& environment) {
  const Variables of("env", environment);
  Launch launch;
  launch.method = "env";
  launch.rank = of.number({"RANK"});
  launch.world_size = of.number({"WORLD_SIZE"});
  launch.local_rank = of.number({"LOCAL_RANK"}, launch.rank);
  launch.address = of.text("MASTER_ADDR").value_or("localhost");
  launch.port = of.number({"MASTER_PORT"}, kDefaultPort);
  return launch;
}

/// The node of rank 0: the first one of the job step.
std::string slurm_address(const Variables& of, int64_t ranks) {
  if (const auto address = of.text("MASTER_ADDR")) {
    return *address;
  }
  for (const auto* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    const auto nodes = of.text(name);
    if (nodes && !nodes->empty()) {
      return first_host(*nodes);
    }
  }
  const auto launcher = of.text("SLURM_LAUNCH_NODE_IPADDR");
  check(
      launcher || ranks == 1,
      "slurm: no address of rank 0; expected MASTER_ADDR or "
      "SLURM_JOB_NODELIST");
  return launcher.value_or("localhost");
}

/// The same on every machine, which std::hash need not be.
uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char c : text) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  return hash;
}

// Jobs that share a node get ports of their own, below those that Linux hands
// out to others.
int64_t port_of_job(uint64_t job) {
  return 20000 + static_cast<int64_t>(job % 12000);
}

/// Steps of a job may run at a time, too.
int64_t slurm_port(const Variables& of) {
  const int64_t job = of.number({"SLURM_JOB_ID"}, 0);
  const int64_t step = of.number({"SLURM_STEP_ID", "SLURM_STEPID"}, 0);
  return of.number(
      {"MASTER_PORT"}, job ? port_of_job(job + 1009 * step) : kDefaultPort);
}

Launch from_slurm(const Environment& environment) {
  const Variables of("slurm", environment);
  Launch launch;
  launch.method = "slurm";
  launch.rank = of.number({"SLURM_PROCID"});
  launch.world_size = of.number({"SLURM_NTASKS", "SLURM_NPROCS"});
  launch.local_rank = of.number({"SLURM_LOCALID"});
  launch.address = slurm_address(of, launch.world_size);
  launch.port = slurm_port(of);
  return launch;
}

int64_t openmpi_port(const Variables& of) {
  const auto job = of.text("PMIX_NAMESPACE");
  return of.number(
      {"MASTER_PORT"}, job ? port_of_job(fnv1a(*job)) : kDefaultPort);
}

/// The address is needed where MPI itself does not move the data.
Launch from_openmpi(const Environment& environment) {
  const Variables of("openmpi", environment);
  Launch launch;
  launch.method = "openmpi";
  launch.rank = of.number({"OMPI_COMM_WORLD_RANK"});
  launch.world_size = of.number({"OMPI_COMM_WORLD_SIZE"});
  launch.local_rank = of.number({"OMPI_COMM_WORLD_LOCAL_RANK"});
  const int64_t here =
      of.number({"OMPI_COMM_WORLD_LOCAL_SIZE"}, launch.world_size);
  const bool one_node = here >= launch.world_size;
  launch.address = of.text("MASTER_ADDR").value_or(one_node ? "localhost" : "");
  launch.port = openmpi_port(of);
  return launch;
}

/// In the script of sbatch itself, where one process runs: srun starts the
/// tasks, and tells each its step.
bool in_batch_script(const Environment& environment) {
  return environment("ENVIRONMENT") == "BATCH" &&
      !environment("SLURM_STEP_ID") && !environment("SLURM_STEPID");
}

Launch from_batch_script(const Environment& environment) {
  const Variables of("slurm", environment);
  const int64_t tasks = of.number({"SLURM_NTASKS", "SLURM_NPROCS"}, 1);
  check(
      tasks == 1,
      "slurm: one process in the script of a job of ",
      tasks,
      " tasks; expected srun before the program");
  return {};
}

/// Half of torchrun's variables, and nobody else's.
void check_not_half_set(const Environment& environment) {
  for (const auto& [set, missing] :
       {std::pair("RANK", "WORLD_SIZE"), std::pair("WORLD_SIZE", "RANK")}) {
    check(
        !environment(set) || environment(missing),
        "env: ",
        set,
        " is set, ",
        missing,
        " is not; expected both, or neither for a single process");
  }
}

Launch by_name(const std::string& name, const Environment& environment) {
  std::string upper = name;
  std::transform(name.begin(), name.end(), upper.begin(), ::toupper);
  if (upper == "ENV") {
    return from_torchrun(environment);
  }
  if (upper == "SLURM") {
    return from_slurm(environment);
  }
  check(
      upper == "OPENMPI",
      kMethodVariables[0],
      "='",
      name,
      "': expected one of ENV, SLURM, OPENMPI");
  return from_openmpi(environment);
}

Launch detect(const Environment& environment) {
  for (const auto* variable : kMethodVariables) {
    const auto chosen = environment(variable);
    if (chosen && !chosen->empty()) {
      return by_name(*chosen, environment);
    }
  }
  if (environment("RANK") && environment("WORLD_SIZE")) {
    return from_torchrun(environment);
  }
  if (environment("SLURM_PROCID")) {
    return in_batch_script(environment) ? from_batch_script(environment)
                                        : from_slurm(environment);
  }
  if (environment("OMPI_COMM_WORLD_RANK")) {
    return from_openmpi(environment);
  }
  check_not_half_set(environment);
  return {};
}

} // namespace

Launch detect_launch(const Environment& environment) {
  const Launch launch = detect(environment);
  check_launch(launch);
  return launch;
}

Launch detect_launch() {
  return detect_launch([](const std::string& name) {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

void check_launch(const Launch& launch) {
  check(
      launch.rank >= 0 && launch.rank < launch.world_size,
      launch.method,
      ": rank ",
      launch.rank,
      " is outside a job of ",
      launch.world_size,
      " processes");
  check(
      launch.local_rank >= 0,
      launch.method,
      ": local rank ",
      launch.local_rank,
      " < 0");
  check(
      launch.port >= 0 && launch.port < 1 << 16,
      launch.method,
      ": port ",
      launch.port,
      ", expected 0 to 65535");
}

std::string address_of_rank_0(const Launch& launch) {
  check(
      !launch.address.empty(),
      launch.method,
      ": ",
      launch.world_size,
      " processes on several nodes need MASTER_ADDR, the address of rank 0: "
      "mpirun -x MASTER_ADDR=...");
  return launch.address;
}

std::string first_host(const std::string& nodes) {
  // Up to the first comma outside brackets.
  std::string host = nodes.substr(0, nodes.find_first_of(",["));
  const auto bracket = host.size();
  if (bracket == nodes.size() || nodes[bracket] == ',') {
    return host;
  }
  const auto number_end = nodes.find_first_of(",-]", bracket);
  host += nodes.substr(bracket + 1, number_end - bracket - 1);
  const auto close = nodes.find(']', bracket);
  if (close == std::string::npos) {
    return host;
  }
  const auto rest = nodes.substr(close + 1);
  return host + (rest.empty() || rest[0] == ',' ? "" : first_host(rest));
}

} // namespace shardtensor
