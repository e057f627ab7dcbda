{{/* The engines' command lines: ours and vLLM's. */}}

{{- define "kvroute.models.image" -}}
{{- $models := .Values.modelServers -}}
{{- $ours := eq $models.engine "kvroute" -}}
{{- $repository := default (ternary "ghcr.io/kvroute/model-server" "vllm/vllm-openai" $ours) $models.image.repository -}}
{{- include "kvroute.image" (list (merge (dict "repository" $repository) $models.image) (ternary .Chart.AppVersion "v0.32.0" $ours)) -}}
{{- end -}}

{{/* End of the names of a set of model servers: that of modelServers, or one of moreModelServers. */}}
{{- define "kvroute.models.suffix" -}}
-models{{ with .Set }}-{{ . }}{{ end }}
{{- end -}}

{{/* Labels by which the Deployment of a set selects its pods. */}}
{{- define "kvroute.models.selector" -}}
{{ include "kvroute.selector" (list . "model-server") }}
kvroute.dev/model-servers: {{ default "main" .Set }}
{{- end -}}

{{- define "kvroute.models.port" -}}
{{- first .Values.modelServers.targetPorts -}}
{{- end -}}

{{/* Value of the engine's model flag. */}}
{{- define "kvroute.models.path" -}}
{{- $model := .Values.modelServers.model -}}
{{- if eq $model.source "hub" -}}
{{- $repository := required "modelServers.model.hub.repository: with source=hub, name the repository (OWNER/NAME)" $model.hub.repository -}}
{{- ternary $repository (printf "/models/%s/%s" $repository $model.hub.revision) (eq .Values.modelServers.engine "vllm") -}}
{{- else if eq $model.source "pvc" -}}
{{- $_ := required "modelServers.model.pvc.claim: with source=pvc, name the claim" $model.pvc.claim -}}
{{- printf "/models/%s" $model.pvc.path | trimSuffix "/" -}}
{{- else if eq .Values.modelServers.engine "kvroute" -}}
kvroute-tiny
{{- else -}}
{{- fail "modelServers.model.source: builtin is the tiny model of engine kvroute alone; choose hub or pvc" -}}
{{- end -}}
{{- end -}}

{{- define "kvroute.models.topic" -}}
kv@$(POD_IP):{{ include "kvroute.models.port" . }}@{{ .Values.modelServers.model.name }}
{{- end -}}

{{/* Environment with the bearer token of the administration port, if configured. */}}
{{- define "kvroute.models.adminToken" -}}
{{- with .Values.modelServers.adminTokenSecret }}
{{- if .name }}
- name: KVROUTE_ADMIN_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvroute.models.args.kvroute" -}}
{{- $models := .Values.modelServers -}}
{{- if has (int64 $models.adminPort) (list (include "kvroute.models.port" . | int64) (int64 $models.kvEventsPort) (int64 $models.kvReplayPort)) -}}
{{- fail "modelServers.adminPort: is one of targetPorts, kvEventsPort and kvReplayPort; choose another port" -}}
{{- end -}}
- model-server
- --host=0.0.0.0
- --port={{ include "kvroute.models.port" . }}
- --admin-port={{ int64 $models.adminPort }}
- --model={{ include "kvroute.models.path" . }}
- --served-model-name={{ $models.model.name }}
- --kv-events-endpoint=tcp://*:{{ int64 $models.kvEventsPort }}
- --kv-replay-endpoint={{ if $models.kvReplayPort }}tcp://*:{{ int64 $models.kvReplayPort }}{{ end }}
- --kv-events-topic={{ include "kvroute.models.topic" . }}
{{- if $models.gpus }}
- --device=cuda
{{- end }}
{{- if gt (int $models.tensorParallel) 1 }}
- --tensor-parallel-size={{ int64 $models.tensorParallel }}
{{- end }}
{{- with $models.hostTierGiB }}
- --cpu-gib={{ . }}
{{- end }}
{{- with $models.loraAdapters }}
- --max-loras={{ max 4 (len .) }}
{{- end }}
{{- include "kvroute.models.loraModules" . }}
{{- end -}}

{{- define "kvroute.models.loraModules" }}
{{- with .Values.modelServers.loraAdapters }}
- --lora-modules
{{- range . }}
- {{ printf "%s=%s" .name .path | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvroute.models.args.vllm" -}}
{{- $models := .Values.modelServers -}}
{{- $events := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" (printf "tcp://*:%d" (int64 $models.kvEventsPort)) "topic" (include "kvroute.models.topic" .) -}}
{{- if $models.kvReplayPort }}{{ $_ := set $events "replay_endpoint" (printf "tcp://*:%d" (int64 $models.kvReplayPort)) }}{{ end -}}
- {{ include "kvroute.models.path" . }}
{{- if eq $models.model.source "hub" }}
- --revision={{ $models.model.hub.revision }}
{{- end }}
- --host=0.0.0.0
- --port={{ include "kvroute.models.port" . }}
- --served-model-name={{ $models.model.name }}
- --enable-prefix-caching
# Reports cached tokens in usage, for comparison with the router's predictions.
- --enable-prompt-tokens-details
{{- if eq (get (include "kvroute.router.tokenizers" . | fromYaml) $models.model.name) "pods" }}
# Enables the render endpoints, from which the router gets a prompt's tokens.
- --enable-scale-out
{{- end }}
- {{ printf "--kv-events-config=%s" (toRawJson $events) | quote }}
{{- if gt (int $models.tensorParallel) 1 }}
- --tensor-parallel-size={{ int64 $models.tensorParallel }}
{{- end }}
{{- if $models.loraAdapters }}
- --enable-lora
{{- end }}
{{- include "kvroute.models.loraModules" . }}
{{- if $models.hostTierGiB }}
# Events of the host tier carry tokens, so that blocks never stored on the device are known too.
{{- $tier := dict "cpu_bytes_to_use" (int64 (mulf $models.hostTierGiB 1073741824)) "self_describing_kv_events" true }}
- {{ printf "--kv-transfer-config=%s" (dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" $tier | toRawJson) | quote }}
{{- end }}
{{- end -}}

{{- define "kvroute.models.env" -}}
{{- $models := .Values.modelServers -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{ include "kvroute.hubEnv" (list $models.model.hub.tokenSecret (ternary "/models" "/tmp/huggingface" (eq $models.model.source "hub"))) }}
{{- if eq $models.engine "vllm" }}
# Cache directories that are writable with a read-only image, and a user name, which the image lacks.
{{- range $name, $value := dict "HOME" "/tmp" "USER" "kvroute" "LOGNAME" "kvroute" "XDG_CACHE_HOME" "/tmp/cache" "XDG_CONFIG_HOME" "/tmp/config" "VLLM_CACHE_ROOT" "/tmp/cache/vllm" "TORCHINDUCTOR_CACHE_DIR" "/tmp/cache/inductor" "TRITON_CACHE_DIR" "/tmp/cache/triton" }}
- name: {{ $name }}
  value: {{ $value }}
{{- end }}
{{- else if $models.gpus }}
# Triton compiles the engine's kernels; the image is read-only.
- name: TRITON_CACHE_DIR
  value: /tmp/cache/triton
{{- end }}
{{- with $models.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvroute.models.resources" -}}
{{- $models := .Values.modelServers -}}
{{- $resources := deepCopy $models.resources -}}
{{- if $models.gpus -}}
{{- $_ := set $resources "limits" (merge (dict $models.gpuResource (int64 $models.gpus)) (default dict $resources.limits)) -}}
{{- if lt (int $models.gpus) (int $models.tensorParallel) -}}
{{- fail "modelServers.gpus: fewer than modelServers.tensorParallel" -}}
{{- end -}}
{{- else if and (eq $models.engine "vllm") (gt (int $models.tensorParallel) 1) -}}
{{- fail (printf "modelServers.tensorParallel: %d processes of vLLM need a GPU each, and modelServers.gpus is 0; set gpus, or tensorParallel: 1" (int $models.tensorParallel)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Name of the volume claim behind /models, if any. */}}
{{- define "kvroute.models.claim" -}}
{{- $model := .Values.modelServers.model -}}
{{- if eq $model.source "pvc" -}}
{{- $model.pvc.claim -}}
{{- else if eq $model.source "hub" -}}
{{- if $model.hub.cache.claim }}{{ $model.hub.cache.claim }}{{ else if $model.hub.cache.size }}{{ include "kvroute.fullname" . }}{{ include "kvroute.models.suffix" . }}{{ end -}}
{{- end -}}
{{- end -}}
