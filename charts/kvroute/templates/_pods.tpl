{{/* Parts of pods that several workloads share. */}}

{{- define "kvroute.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvroute.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Scheduling and security settings of a workload's pods. Takes (list root values component). */}}
{{- define "kvroute.placement" -}}
{{- $root := index . 0 }}{{ $values := index . 1 }}{{ $component := index . 2 -}}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.priorityClassName }}
priorityClassName: {{ $values.priorityClassName }}
{{- else if $root.Values.priorityClass.create }}
priorityClassName: {{ include "kvroute.fullname" $root }}-{{ $root.Release.Namespace }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- with $values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvroute.selector" (list $root $component) | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of a workload's pods. Takes (list root values component annotations). They contain no version:
     a new chart must not restart model servers, which would lose their caches. */}}
{{- define "kvroute.podMetadata" -}}
{{- $values := index . 1 -}}
labels:
  {{- include "kvroute.selector" (list (index . 0) (index . 2)) | nindent 2 }}
  {{- with (index . 0).Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (index . 3) (default dict $values.podAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
