{{/* Names, labels and images that several objects share. */}}

{{- define "kvroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* Selector labels, which never change over upgrades. Takes (list root component). */}}
{{- define "kvroute.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "kvroute.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* All labels of an object. Takes (list root component). */}}
{{- define "kvroute.labels" -}}
{{- $root := index . 0 -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: kvroute
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace and labels of an object. Takes (list root component suffix). */}}
{{- define "kvroute.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "kvroute.fullname" $root }}{{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "kvroute.labels" . | nindent 2 }}
{{- end -}}

{{/* Image reference. Takes (list image default-tag). */}}
{{- define "kvroute.image" -}}
{{- $image := index . 0 -}}
image: {{ $image.digest | empty | ternary (printf "%s:%s" $image.repository (default (index . 1) $image.tag)) (printf "%s@%s" $image.repository $image.digest) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* The images of the release, as a YAML list. */}}
{{- define "kvroute.images" -}}
{{- $lines := list (include "kvroute.image" (list .Values.router.image .Chart.AppVersion)) -}}
{{- if .Values.modelServers.enabled }}{{ $lines = append $lines (include "kvroute.models.image" .) }}{{ end -}}
{{- if eq .Values.mode "standalone" }}{{ $lines = append $lines (include "kvroute.image" (list .Values.envoy.image "")) }}{{ end -}}
{{- range uniq $lines }}
- {{ (fromYaml .).image }}
{{- end }}
{{- end -}}

{{- define "kvroute.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create -}}
{{ include "kvroute.fullname" . }}-epp
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* A service's name in the cluster's DNS. Takes (list root suffix). */}}
{{- define "kvroute.host" -}}
{{- $root := index . 0 -}}
{{ include "kvroute.fullname" $root }}{{ index . 1 }}.{{ $root.Release.Namespace }}.svc.{{ $root.Values.clusterDomain }}
{{- end -}}

{{/* Labels of the model servers' pods. */}}
{{- define "kvroute.poolLabels" -}}
{{- if .Values.modelServers.enabled -}}
llm-d.ai/inference-serving: "true"
{{ include "kvroute.selector" (list . "model-server") }}
{{- else if .Values.modelServers.matchLabels -}}
{{- toYaml .Values.modelServers.matchLabels }}
{{- else -}}
{{- fail "modelServers.matchLabels: with modelServers.enabled=false, name the labels of the pods to pick" }}
{{- end -}}
{{- end -}}

{{/* Whether an InferencePool tells pods and picker: "true", or empty. */}}
{{- define "kvroute.pooled" -}}
{{- if and (eq .Values.mode "gateway") (eq .Values.gateway.kind "inferencePool") -}}true{{- end -}}
{{- end -}}

{{- define "kvroute.poolName" -}}
{{- default (include "kvroute.fullname" .) .Values.gateway.inferencePool.name -}}
{{- end -}}

{{/* HTTP ports of the model servers' pods. */}}
{{- define "kvroute.targetPorts" -}}
{{- $ports := .Values.modelServers.targetPorts -}}
{{- toJson (ternary (list (first $ports)) $ports .Values.modelServers.enabled) -}}
{{- end -}}
