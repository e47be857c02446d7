# Run by root on a machine of `--on ssh:FILE`. ACTION is claim, release or show. It prints the claim of the machine.
set -euo pipefail
umask 022
ACTION=@ACTION@
NAME=@NAME@
CLAIM=@CLAIM@
KEY=@KEY@
VARIABLES=@VARIABLES@
ROOT=@ROOT@

FOLDER=$ROOT/var/lib/forerun
SETTINGS=$ROOT/etc/default/forerun
BEGIN="# begin: written by forerun" END="# end: written by forerun"

owner() { sed -n 's/^name: //p' "$FOLDER/claim" 2>/dev/null || true; }

# systemd reads a comment only on its own line, so marks are around the lines.
settings() {
  mkdir -p "$(dirname "$SETTINGS")"
  touch "$SETTINGS"
  sed "/^$BEGIN\$/,/^$END\$/d" "$SETTINGS" >"$SETTINGS.new"
  if [ -n "$1" ]; then printf '%s\n' "$BEGIN" "$1" "$END" >>"$SETTINGS.new"; fi
  mv -f "$SETTINGS.new" "$SETTINGS"
}

# Secrets and the job are removed. Logs, the installed packages and everything in the bucket remain.
clean() {
  rm -rf "$FOLDER/inbox" "$FOLDER/job" "$FOLDER/secret" "$FOLDER/environment" "$FOLDER/agent.json" "$FOLDER/accepted" \
    "$FOLDER/state" "$FOLDER/units" "$FOLDER/wheel" "$FOLDER/requirements.lock" "$FOLDER/startup.sh" "$FOLDER/startup.pid" \
    "$FOLDER/.bundle" "$FOLDER/agent-log.json" "$FOLDER/export"
}

# Replace the key that may log in as the user forerun. Other users and their keys are not changed.
allow() {
  local home=$ROOT/home/forerun
  if [ -z "$ROOT" ]; then
    # The password `*` matches nothing. Without it the account is locked, and sshd without PAM refuses its keys too.
    id -u forerun >/dev/null 2>&1 || useradd --create-home --shell /bin/bash --password '*' forerun
    home=$(getent passwd forerun | cut -d: -f6)
  fi
  (umask 077 && mkdir -p "$home/.ssh" && echo "$1" >"$home/.ssh/authorized_keys")
  if [ -z "$ROOT" ]; then chown -R forerun "$home/.ssh"; fi
}

end_startup() {
  local pid
  pid=$(cat "$FOLDER/startup.pid" 2>/dev/null) || return 0
  if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "$FOLDER/startup.sh"; then
    kill -- "-$pid" || true
  fi
}

# Only root may change the claim, and a claim is complete or absent.
write_claim() {
  echo "$CLAIM" >"$FOLDER/.claim.new"
  mv -f "$FOLDER/.claim.new" "$FOLDER/claim"
}

mkdir -p "$FOLDER"
exec 8>"$FOLDER/.claim-lock"
flock 8
case $ACTION in
  claim)
    if [ -n "$(owner)" ] && [ "$(owner)" != "$NAME" ]; then
      cat "$FOLDER/claim"
      exit 79
    fi
    if [ "$(owner)" != "$NAME" ]; then
      clean
      settings "$VARIABLES"
      allow "$KEY"
      cat >"$FOLDER/startup.sh" <<'END_OF_STARTUP'
@STARTUP@
END_OF_STARTUP
      write_claim
    fi
    if [ -f "$FOLDER/startup.sh" ]; then
      setsid bash "$FOLDER/startup.sh" </dev/null >/dev/null 2>&1 8>&- &
      echo $! >"$FOLDER/startup.pid"
    fi
    ;;
  release)
    if [ "$(owner)" = "$NAME" ]; then
      systemctl stop forerun-train forerun-agent 2>/dev/null || true
      end_startup
      settings ""
      allow ""
      clean
      rm -f "$FOLDER/claim"
    fi
    ;;
esac
cat "$FOLDER/claim" 2>/dev/null || true
