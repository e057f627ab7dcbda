# preStop script that drains an Envoy: bash drain-envoy.sh ADMIN_PORT ANNOUNCE_SECONDS TIMEOUT_SECONDS
#
# Fails readiness and makes Envoy close client connections after their responses; then waits for new connections
# to go to other pods and for running requests to end. Needs only bash: Envoy's images have no curl.
set -u

ask() { # METHOD PATH: prints the admin API's response
  exec 3<>"/dev/tcp/127.0.0.1/$admin_port" || exit 0
  printf '%s %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}

requests() { # prints the number of running requests
  local answer line
  answer=$(ask GET '/stats?filter=^http.gateway.downstream_rq_active$')
  line=${answer##*downstream_rq_active: }
  echo "${line%%[!0-9]*}"
}

admin_port=$1 announce_s=$2 timeout_s=$3
ask POST /healthcheck/fail >/dev/null
sleep "$announce_s"
for ((waited_s = 0; waited_s < timeout_s; waited_s++)); do
  [[ $(requests) == 0 ]] && break
  sleep 1
done
