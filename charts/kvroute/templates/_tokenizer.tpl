{{/* Sidecar container of the router that tokenizes. */}}

{{- define "kvroute.tokenizer.container" -}}
{{- $models := include "kvroute.tokenizer.models" . | fromYaml -}}
{{- if not $models }}
{{- fail "tokenizer.source: with tokenizer.enabled=true, tell where the model's tokenizer comes from" }}
{{- end -}}
- name: tokenizer
  {{- include "kvroute.image" (list .Values.router.image .Chart.AppVersion) | nindent 2 }}
  args:
    - tokenizer
    - --socket=/run/kvroute/tokenizer.sock
    {{- range $model, $source := $models }}
    - --model={{ $model }}={{ $source }}
    {{- end }}
    {{- with .Values.tokenizer.threads }}
    - --threads={{ int64 . }}
    {{- end }}
  env:
    {{- include "kvroute.hubEnv" (list .Values.router.hubTokenSecret "/tmp/huggingface") | nindent 4 }}
  # It listens once every tokenizer is loaded; until then the router picks by load.
  readinessProbe:
    exec:
      command: [python3, -c, "import socket; socket.socket(socket.AF_UNIX).connect('/run/kvroute/tokenizer.sock')"]
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  resources:
    {{- toYaml .Values.tokenizer.resources | nindent 4 }}
  securityContext:
    {{- include "kvroute.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: run, mountPath: /run/kvroute}
    {{- with .Values.router.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "kvroute.tokenizer.models" -}}
{{- $models := dict -}}
{{- range $model, $source := .Values.router.tokenizers -}}
{{- if eq (include "kvroute.tokenizer.takes" $source) "true" }}{{ $_ := set $models $model $source }}{{ end -}}
{{- end -}}
{{- with .Values.tokenizer.source -}}
{{- $_ := set $models $.Values.modelServers.model.name . -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}
