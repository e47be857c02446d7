#!/bin/bash
# Startup script of forerun, run by root at every boot. It can be repeated at any time, and contains no secret.
# It installs Python and one exact version of forerun, waits for the job, tests the devices and starts the training.
set -Eeuo pipefail  # E: the trap below also holds inside functions
umask 022

RUN=@RUN@
DEVICE=@DEVICE@
HOSTS=@HOSTS@
PYTHON=@PYTHON@
WHEEL_SHA256=@WHEEL_SHA256@
LOCK_SHA256=@LOCK_SHA256@
UV_REQUIREMENT=@UV_REQUIREMENT@
BUNDLE_SECONDS=@BUNDLE_SECONDS@
SETUP_SECONDS=@SETUP_SECONDS@
LIMIT_SECONDS=@LIMIT_SECONDS@
DELETION=@DELETION@

STATE_FOLDER=/var/lib/forerun
LOG_FOLDER=/var/log/forerun
OPT=/opt/forerun
VENV=$OPT/venv
USER_NAME=forerun
UNITS=/etc/systemd/system
export HOME=${HOME:-/root}

mkdir -p "$STATE_FOLDER" "$LOG_FOLDER" "$OPT"
chmod 755 "$STATE_FOLDER" "$LOG_FOLDER" "$OPT"
exec > >(tee -a "$LOG_FOLDER/startup.log") 2>&1
exec 9>"$STATE_FOLDER/.startup-lock"
flock -n 9 || { echo "another startup script runs already"; exit 0; }

# One line with the phase, and the reason of a failure. The agent and the controller read it.
state() {
  echo "$(date -u +%FT%TZ) $*"
  echo "$*" >"$STATE_FOLDER/.state.new"
  chmod 644 "$STATE_FOLDER/.state.new"
  mv -f "$STATE_FOLDER/.state.new" "$STATE_FOLDER/state"
}

fail() {
  trap - ERR
  state "failed $*"
  exit 1
}

# `broken` means that the machine itself is at fault: the controller replaces the slice instead of repeating the setup.
broken() {
  trap - ERR
  state "broken $*"
  exit 1
}

repeat() {
  local try
  for try in 1 2 3 4 5; do
    "$@" && return
    echo "try $try failed: $1"
    sleep $((try * 2))
  done
  return 1
}

trap 'fail "line $LINENO: $BASH_COMMAND"' ERR

settings() {
  # Endpoints of private services and package sources, such as UV_DEFAULT_INDEX; the units read the same file.
  if [ -f /etc/default/forerun ]; then
    set -a
    # shellcheck disable=SC1091
    . /etc/default/forerun
    set +a
  fi
  export UV_CACHE_DIR=${UV_CACHE_DIR:-$OPT/cache}
  export UV_PYTHON_INSTALL_DIR=${UV_PYTHON_INSTALL_DIR:-$OPT/python}
  export UV_NO_PROGRESS=1
}

# The functions of the watch. It deletes the slice without an agent, a controller and the bucket: if no agent was started
# within SETUP_SECONDS, and after LIMIT_SECONDS whatever the agent does. Both are counted from the first boot on.
uptime_seconds() { cut -d. -f1 /proc/uptime; }
boot_id() { cat /proc/sys/kernel/random/boot_id; }

# Sets `counted` to the seconds since the first boot. A file keeps them over reboots. Within a boot, no clock changes
# them. For the time of a reboot, the clock adds at most one hour.
count_seconds() {
  local up wall gap old_counted old_boot old_up old_wall form='^[0-9]{1,10} [0-9a-f-]+ [0-9]{1,10} [0-9]{1,11}$'
  up=$(uptime_seconds) wall=$(date +%s)
  if [ -z "${counted_line:-}" ]; then
    counted_line=$(tr -d '\0' 2>/dev/null <"$STATE_FOLDER/.counted") || counted_line=
    # Without the file, or with a damaged one, the time since this boot counts.
    [[ $counted_line =~ $form ]] || counted_line="$up $(boot_id) $up $wall"
  fi
  read -r old_counted old_boot old_up old_wall <<<"$counted_line"
  if [ "$old_boot" = "$(boot_id)" ] && [ "$((10#$old_up))" -le "$up" ]; then
    gap=$((up - 10#$old_up))
  else
    gap=$((wall - 10#$old_wall))
    if [ "$gap" -gt 3600 ]; then gap=3600; fi
    if [ "$gap" -lt "$up" ]; then gap=$up; fi
  fi
  counted=$((10#$old_counted + gap))
  counted_line="$counted $(boot_id) $up $wall"
  # A full disk does not end the watch: until the next boot, the value in memory is enough.
  echo "$counted_line" >"$STATE_FOLDER/.counted.new" && mv -f "$STATE_FOLDER/.counted.new" "$STATE_FOLDER/.counted" || true
}

delete_slice() {
  local api path base project token metadata=http://metadata.google.internal/computeMetadata/v1
  project=$(curl -sf -m 10 -H "Metadata-Flavor: Google" "$metadata/project/project-id") || project=
  token=$(curl -sf -m 10 -H "Metadata-Flavor: Google" "$metadata/instance/service-accounts/default/token" |
    sed -n 's/.*"access_token" *: *"\([^"]*\)".*/\1/p') || token=
  while read -r api path; do
    base=https://tpu.googleapis.com/
    if [ "$api" = tpu ]; then base=${CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU:-$base}; fi
    if [ "$api" = compute ]; then
      base=${CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE:-https://compute.googleapis.com/compute/v1/}
    fi
    # The token is read from standard input: process lists show arguments.
    echo "header = \"Authorization: Bearer $token\"" |
      curl -s -m 60 -o /dev/null -w "%{http_code} DELETE $path\n" -X DELETE -K - "$base${path//PROJECT/$project}" || true
  done <<<"$DELETION"
}

watch_slice() {
  while true; do
    count_seconds
    # Not `is-active`: an agent that is being restarted at this moment is no reason to delete the slice.
    if [ -n "$LIMIT_SECONDS" ] && [ "$counted" -ge "$LIMIT_SECONDS" ]; then
      echo "the slice still exists after $counted seconds: it is deleted"
      delete_slice
    elif [ -e "$STATE_FOLDER/.agent-started" ]; then
      if [ -z "$LIMIT_SECONDS" ]; then return 0; fi
    elif [ "$counted" -ge "$SETUP_SECONDS" ]; then
      echo "no agent runs after $counted seconds: the slice is deleted"
      delete_slice
    fi
    sleep 30
  done
}

# Starts the watch as a unit, which lives as long as the machine. Processes of this script may end with the script.
start_watch() {
  if [ -z "$DELETION" ]; then return 0; fi
  {
    declare -p STATE_FOLDER SETUP_SECONDS LIMIT_SECONDS DELETION
    declare -f uptime_seconds boot_id count_seconds delete_slice watch_slice
    echo watch_slice
  } >"$STATE_FOLDER/.watch.new"
  mv -f "$STATE_FOLDER/.watch.new" "$STATE_FOLDER/watch.sh"
  cat >"$UNITS/forerun-watch.service" <<END
[Unit]
Description=forerun: the watch that deletes the slice if its agent does not
StartLimitIntervalSec=0

[Service]
Type=exec
EnvironmentFile=-/etc/default/forerun
ExecStart=/bin/bash $STATE_FOLDER/watch.sh
Restart=on-failure
RestartSec=5
OOMScoreAdjust=-900
StandardOutput=append:$LOG_FOLDER/watch.log
StandardError=append:$LOG_FOLDER/watch.log
END
  systemctl daemon-reload
  systemctl start forerun-watch
}

folders() {
  id -u "$USER_NAME" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash --password '*' "$USER_NAME"
  mkdir -p "$STATE_FOLDER/inbox"
  chmod 700 "$STATE_FOLDER/inbox"
  chown "$USER_NAME" "$STATE_FOLDER/inbox"
}

install_uv() {
  if command -v uv >/dev/null; then
    UV=$(command -v uv)
    return
  fi
  UV=$OPT/uv/bin/uv
  test -x "$UV" && return
  if ! python3 -m pip --version >/dev/null 2>&1; then
    repeat apt-get update -qq
    DEBIAN_FRONTEND=noninteractive repeat apt-get install -qq -y python3-pip
  fi
  # The requirement has the hashes of the wheels, so another file is refused.
  echo "$UV_REQUIREMENT" >"$OPT/uv.txt"
  rm -rf "$OPT/uv"
  repeat python3 -m pip install --quiet --root-user-action=ignore --target "$OPT/uv" --require-hashes --no-deps \
    --only-binary :all: --requirement "$OPT/uv.txt"
}

# Package sources may be slow to answer. `uv` verifies the interpreter that it downloads by a hash.
install_python() {
  "$UV" python find "$PYTHON" >/dev/null 2>&1 || repeat "$UV" python install "$PYTHON"
}

accept_bundle() {
  local inbox=$STATE_FOLDER/inbox new=$STATE_FOLDER/.bundle waited=0
  if [ ! -f "$inbox/bundle.tar" ] && [ -f "$STATE_FOLDER/accepted" ]; then
    return # a reboot: the job is here since the first boot
  fi
  state waiting
  until [ -f "$inbox/bundle.tar" ]; do
    sleep 1
    waited=$((waited + 1))
    test "$waited" -lt "$BUNDLE_SECONDS" || fail "no job arrived within $BUNDLE_SECONDS seconds"
  done
  rm -rf "$new"
  (umask 077 && mkdir "$new" && tar -x --no-same-owner --no-same-permissions -f "$inbox/bundle.tar" -C "$new")
  (
    cd "$new"
    echo "$WHEEL_SHA256  $(echo ./*.whl)" | sha256sum --check --strict --quiet
    echo "$LOCK_SHA256  requirements.lock" | sha256sum --check --strict --quiet
  ) || { rm -rf "$new" "$inbox/bundle.tar"; fail "the delivered wheel or lock is not the planned one"; }
  local name
  for name in job secret environment agent.json requirements.lock units wheel; do
    rm -rf "${STATE_FOLDER:?}/$name"
  done
  mkdir "$new/wheel"
  mv "$new"/*.whl "$new/wheel/"
  chmod 600 "$new/secret" "$new/environment"
  for name in job secret environment agent.json requirements.lock units wheel; do
    mv "$new/$name" "$STATE_FOLDER/$name"
  done
  sha256sum <"$inbox/bundle.tar" | cut -d' ' -f1 >"$STATE_FOLDER/accepted"
  chmod 644 "$STATE_FOLDER/accepted"
  rm -rf "$new" "$inbox/bundle.tar" # the tar file has the secrets: only the files of root remain
}

install_forerun() {
  local digest
  digest=$(echo "$PYTHON $WHEEL_SHA256 $LOCK_SHA256" | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$VENV/.forerun" 2>/dev/null)" = "$digest" ]; then
    return # a reboot, or an image that contains this version
  fi
  state installing
  rm -rf "$VENV"
  "$UV" venv --quiet --python "$PYTHON" "$VENV"
  repeat "$UV" pip install --quiet --python "$VENV/bin/python" --require-hashes \
    --requirement "$STATE_FOLDER/requirements.lock"
  "$UV" pip install --quiet --python "$VENV/bin/python" --no-deps --no-index "$STATE_FOLDER"/wheel/*.whl
  "$VENV/bin/python" -P -c "import forerun.version as v; print('forerun', v.__version__)"
  echo "$digest" >"$VENV/.forerun"
}

install_units() {
  install -m 644 "$STATE_FOLDER/units/forerun-train.service" "$UNITS/forerun-train.service"
  install -m 644 "$STATE_FOLDER/units/forerun-agent.service" "$UNITS/forerun-agent.service"
  systemctl daemon-reload
}

check_devices() {
  [ "$DEVICE" != none ] || return 0 # a keeper trains nothing
  state checking
  local waited=0
  if [ "$DEVICE" = gpu ]; then
    # Images with drivers may install them during the first boot.
    until nvidia-smi >/dev/null 2>&1; do
      sleep 5
      waited=$((waited + 5))
      test "$waited" -lt 900 || broken "nvidia-smi does not work: the image has no driver"
    done
  fi
  local variables=("FORERUN_SMOKE_SECONDS=${FORERUN_SMOKE_SECONDS:-3}")
  if [ "$DEVICE" = tpu ] && [ "$HOSTS" -gt 1 ]; then
    # The chips of this host only: the runtime otherwise waits for the other hosts of the slice.
    variables+=(TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 TPU_VISIBLE_CHIPS=0,1,2,3)
  fi
  # `device=` makes a fallback to the CPU an error.
  if ! (cd / && env "${variables[@]}" timeout 900 "$VENV/bin/forerun" doctor --smoke "device=$DEVICE"); then
    broken "forerun doctor --smoke device=$DEVICE failed: see $LOG_FOLDER/startup.log"
  fi
}

echo "$(date -u +%FT%TZ) startup of the run $RUN"
start_watch # before all that may fail, and before the script ends early
settings
folders
if systemctl is-active --quiet forerun-train; then
  echo "the training runs already"
  exit 0
fi
state preparing
install_uv
install_python
accept_bundle
install_forerun
install_units
systemctl start forerun-agent
touch "$STATE_FOLDER/.agent-started"
check_devices
state starting
systemctl start forerun-train
state started
