{{/* The router's command line. */}}

{{- define "kvroute.router.args" -}}
{{- $router := .Values.router -}}
- router
- --grpc-port=9002
- --grpc-health-port=9003
- --metrics-port=9090
{{- if .Values.monitoring.auth }}
- --metrics-endpoint-auth=true
{{- end }}
{{ include "kvroute.router.podArgs" . }}
- --responses={{ ternary "full" "skip" (or (eq .Values.mode "gateway") (eq .Values.envoy.responses "full")) }}
- --max-request-bytes={{ int64 $router.maxRequestBytes }}
- --max-streams={{ int64 $router.maxStreams }}
{{- if not (kindIs "invalid" $router.forbiddenBodyFields) }}
- --forbidden-body-fields={{ join "," $router.forbiddenBodyFields }}
{{- end }}
{{- if eq (include "kvroute.kvConnector" .) "true" }}
{{- if eq .Values.mode "gateway" }}
{{- if and (include "kvroute.pooled" .) .Values.gateway.inferencePool.create (eq .Values.gateway.inferencePool.failureMode "FailOpen") }}
{{- fail "gateway.inferencePool.failureMode: FailOpen lets clients' KV transfer parameters through to engines with a KV connector; choose FailClose" }}
{{- end }}
{{- else if .Values.envoy.failOpen }}
{{- fail "envoy.failOpen: it lets clients' KV transfer parameters through to engines with a KV connector; set it to false" }}
{{- end }}
- --kv-connector=true
{{- end }}
{{- with $router.tenantSalt }}
{{- if .header }}
{{- if and (eq $.Values.mode "standalone") (ne $.Values.envoy.door "ext_proc") }}
{{- fail "router.tenantSalt.header: the salt is set in the request's body, which ext_authz cannot do; set envoy.door: ext_proc" }}
{{- end }}
{{- if and (include "kvroute.pooled" $) $.Values.gateway.inferencePool.create (eq $.Values.gateway.inferencePool.failureMode "FailOpen") }}
{{- fail "gateway.inferencePool.failureMode: FailOpen sends requests with salts that clients choose; choose FailClose" }}
{{- end }}
- --salt-from=header:{{ .header }}
- --salt-key-file=/etc/kvroute-salt/{{ .keySecret.key }}
{{- end }}
{{- end }}
- --drain-timeout={{ int64 $router.drain.timeoutSeconds }}s
{{- if $router.tracing.enabled }}
- --tracing=true
{{- end }}
{{- if $router.config }}
- --config-file=/etc/kvroute/config.yaml
{{- end }}
{{- if not (include "kvroute.pooled" .) }}
{{- range $router.objectives }}
- --objective={{ .name }}={{ int64 .priority }}
{{- end }}
{{- end }}
{{- range $model, $source := include "kvroute.router.tokenizers" . | fromYaml }}
- --tokenizer={{ $model }}={{ $source }}
{{- end }}
{{ include "kvroute.router.indexArgs" . }}
{{- if .Values.peers.enabled }}
- --peer={{ include "kvroute.host" (list . "-epp-pods") }}:9002
{{- end }}
{{- with $router.verbosity }}
- -v={{ int64 . }}
{{- end }}
{{- with $router.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether the values configure a KV connector. */}}
{{- define "kvroute.kvConnector" -}}
{{- $models := .Values.modelServers -}}
{{- $connects := $models.kvConnector -}}
{{- $args := $models.extraArgs -}}
{{- range .Values.moreModelServers }}{{ $connects = or $connects .kvConnector }}{{ $args = concat $args (default list .extraArgs) }}{{ end -}}
{{- or $connects (contains "--kv-transfer-config" (join " " $args)) (hasKey $models.matchLabels "llm-d.ai/role") -}}
{{- end -}}

{{/* Flags of pod discovery and of event sources. */}}
{{- define "kvroute.router.podArgs" -}}
{{- if include "kvroute.pooled" . -}}
- --pool-name={{ include "kvroute.poolName" . }}
- --pool-namespace={{ .Release.Namespace }}
{{- range .Values.gateway.inferencePool.more }}
- --pool-port={{ .name }}={{ int64 .port }}
{{- end }}
{{- else -}}
{{- $labels := list -}}
{{- range $label, $value := include "kvroute.poolLabels" . | fromYaml }}{{ $labels = append $labels (printf "%s=%s" $label $value) }}{{ end -}}
- --endpoint-selector={{ join "," $labels }}
- --endpoint-target-ports={{ include "kvroute.targetPorts" . | fromJsonArray | join "," }}
{{- end }}
- --kube-deadline={{ .Values.router.kubeDeadline }}
- --kv-events-port={{ int64 .Values.modelServers.kvEventsPort }}
- --kv-replay-port={{ int64 .Values.modelServers.kvReplayPort }}
{{- end -}}

{{- define "kvroute.router.indexArgs" -}}
{{- $indexer := .Values.indexer -}}
- --backend={{ $indexer.backend }}
- --block-tokens={{ int64 $indexer.blockTokens }}
- --capacity-blocks={{ int64 $indexer.capacityBlocks }}
- --capacity-bytes={{ int64 $indexer.capacityBytes }}
{{- if $indexer.hashSeedSecret.name }}
{{- if not (kindIs "invalid" $indexer.hashSeed) }}
{{- fail "indexer.hashSeed: indexer.hashSeedSecret.name is set, too; give one of them" }}
{{- end }}
- --hash-seed=$(KVROUTE_HASH_SEED)
{{- else if not (kindIs "invalid" $indexer.hashSeed) }}
- --hash-seed={{ int64 $indexer.hashSeed }}
{{- else if or .Values.peers.enabled (eq $indexer.backend "redis") }}
{{- fail "indexer.hashSeed: routers that share an index, or are peers, need the same number; choose one that nobody else knows, or name a Secret that holds it in indexer.hashSeedSecret" }}
{{- end }}
{{- with int64 $indexer.eventsBindPort }}
{{- if or (gt (int64 $.Values.router.replicas) 1) $.Values.autoscaling.enabled }}
{{- fail "indexer.eventsBindPort: engines that connect reach one router alone; use one, without autoscaling, or let routers connect to the engines" }}
{{- end }}
- --events-bind=tcp://*:{{ . }}
{{- end }}
{{- if eq $indexer.backend "redis" }}
- --redis-url=$(KVROUTE_REDIS_URL)
- --redis-namespace={{ $indexer.redis.namespace }}
{{- end }}
{{- end -}}

{{/* Tokenizer source by model: router.tokenizers, plus a default for the chart's models. */}}
{{- define "kvroute.router.tokenizers" -}}
{{- $sources := dict -}}
{{- range $model, $source := .Values.router.tokenizers -}}
{{- $_ := set $sources $model (ternary "unix:/run/kvroute/tokenizer.sock" $source (and $.Values.tokenizer.enabled (eq (include "kvroute.tokenizer.takes" $source) "true"))) -}}
{{- end -}}
{{- $main := .Values.modelServers.model.name -}}
{{- $models := list $main -}}
{{- range .Values.moreModelServers }}{{ $models = append $models .model.name }}{{ end -}}
{{- range without $models "kvroute-tiny" -}}
{{- if and $.Values.modelServers.enabled (not (hasKey $sources .)) -}}
{{- $_ := set $sources . (ternary "unix:/run/kvroute/tokenizer.sock" "pods" (and (eq . $main) (ne $.Values.tokenizer.source ""))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $sources -}}
{{- end -}}

{{/* Whether `kvroute tokenizer` can serve a source: a directory or hf:. */}}
{{- define "kvroute.tokenizer.takes" -}}
{{- not (or (eq . "pods") (hasPrefix "unix:" .) (hasPrefix "http://" .) (hasPrefix "https://" .)) -}}
{{- end -}}

{{- define "kvroute.router.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{ include "kvroute.hubEnv" (list .Values.router.hubTokenSecret "/tmp/huggingface") }}
{{- with .Values.indexer.hashSeedSecret }}
{{- if .name }}
- name: KVROUTE_HASH_SEED
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- if eq .Values.indexer.backend "redis" }}
{{ include "kvroute.redis.env" . }}
{{- end }}
{{- include "kvroute.models.adminToken" . }}
{{- if .Values.router.tracing.enabled }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ required "router.tracing.endpoint: tracing needs an OTLP endpoint" .Values.router.tracing.endpoint | quote }}
- name: OTEL_SERVICE_NAME
  value: {{ include "kvroute.fullname" . }}-epp
{{- end }}
{{- with .Values.router.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Environment for Hub downloads: cache directory and token. Takes (list tokenSecret directory). */}}
{{- define "kvroute.hubEnv" -}}
- name: HF_HOME
  value: {{ index . 1 }}
{{- $secret := index . 0 }}
{{- with $secret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $secret.key }}
{{- end }}
{{- end -}}

{{- define "kvroute.redis.env" -}}
{{- $redis := .Values.indexer.redis -}}
- name: KVROUTE_REDIS_URL
  {{- if $redis.deploy }}
  value: redis://{{ include "kvroute.host" (list . "-redis") }}:6379/0
  {{- else if $redis.urlSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ $redis.urlSecret.name }}
      key: {{ $redis.urlSecret.key }}
  {{- else }}
  value: {{ required "indexer.redis.url: with indexer.backend=redis give a url, a urlSecret or deploy=true" $redis.url | quote }}
  {{- end }}
{{- end -}}
