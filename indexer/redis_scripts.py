"""What runs inside Redis: the shared index's writes, each one atomic and checked against the pod's lease.

All names begin with one prefix, KEYS[1], whose hash tag keeps them on one shard of a cluster:

    pods      hash: pod -> "life owner deadline_ms"; the owner, a process, keeps the view up until then
    l:<life>  set: the keys that this life of the pod holds
    b:<key>   string: 8 bytes for each (life, tier) that holds the block: u40 life, u8 tier, u16 references
    used      sorted set: every block by its last use, for the capacity
    dead      set: lives that are over, whose entries have not been swept out of the blocks yet
    meta      hash: "life" and "clock", the last numbers given out; "evicted"

Lives are never used twice, so a life that `pods` does not name holds nothing: a clear takes one command. An
answer says whether it is of a "new" life, which the caller did not ask for.
"""

from __future__ import annotations

_COMMON = """
local prefix = KEYS[1]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Where an entry begins; entries begin at 1, 9, 17...
local function find(block, head)
  local at = 0
  repeat at = string.find(block, head, at + 1, true) until not at or at % 8 == 1
  return at
end

-- A block's entries; '' for none, and for what only somebody else can have written there.
local function checked(block)
  if type(block) ~= 'string' or #block % 8 ~= 0 or #block > 1048576 then return '' end
  return block
end

local function read(name) return checked(redis.pcall('GET', name)) end

local function write(key, block, ttl_s)
  if block == '' then
    redis.call('UNLINK', prefix .. 'b:' .. key)
    redis.call('ZREM', prefix .. 'used', key)
  else
    redis.call('SET', prefix .. 'b:' .. key, block, 'EX', ttl_s)
  end
end

local function cut(block, at) return string.sub(block, 1, at - 1) .. string.sub(block, at + 8) end

-- Milliseconds since 2026 are a floor: should the server lose "meta", old lives still do not come again.
local function new_life()
  local last = tonumber(redis.call('HGET', prefix .. 'meta', 'life') or 0) or 0
  local life = math.max(last + 1, now_ms - 1767225600000)
  redis.call('HSET', prefix .. 'meta', 'life', life)
  return life
end

local function bury(life)
  if redis.call('EXISTS', prefix .. 'l:' .. life) == 1 then redis.call('SADD', prefix .. 'dead', life) end
end

local function view(pod)
  local record = redis.call('HGET', prefix .. 'pods', pod) or ''
  local life, owner, deadline_ms = string.match(record, '^(%d+) (%x+) (%d+)$')
  return tonumber(life), owner, tonumber(deadline_ms)
end

local function keep(pod, life, owner, lease_ms)
  redis.call('HSET', prefix .. 'pods', pod, string.format('%d %s %d', life, owner, now_ms + lease_ms))
end

-- The life to write to: the caller's own, else a new one; nil while another owner keeps the view up.
local function claim(pod, owner, mine, lease_ms)
  local life, holder, deadline_ms = view(pod)
  if life and holder ~= owner and deadline_ms > now_ms then return nil end
  local new = life ~= mine or holder ~= owner
  if new then
    if life then bury(life) end
    life = new_life()
  end
  keep(pod, life, owner, lease_ms)
  return life, new and 1 or 0
end

-- Numbers for so many uses; tells the last.
local function tick(uses)
  local clock = redis.call('HINCRBY', prefix .. 'meta', 'clock', uses)
  if clock == uses then
    local newest = redis.call('ZREVRANGE', prefix .. 'used', 0, 0, 'WITHSCORES')
    if newest[2] then
      clock = redis.call('HINCRBY', prefix .. 'meta', 'clock', string.format('%d', newest[2]))
    end
  end
  return clock
end

local function evict(blocks)
  local dropped = 0
  local popped = redis.call('ZPOPMIN', prefix .. 'used', blocks)
  for i = 1, #popped, 2 do
    local name = prefix .. 'b:' .. popped[i]
    local block = read(name)
    for at = 1, #block, 8 do
      redis.call('SREM', prefix .. 'l:' .. struct.unpack('<I5', block, at), popped[i])
    end
    dropped = dropped + redis.call('UNLINK', name)
  end
  redis.call('HINCRBY', prefix .. 'meta', 'evicted', dropped)
  return dropped
end
"""

# pod, owner, life, lease_ms, ttl_s, tier, capacity_blocks, keys, references or "" -> life or 0, new, blocks
ADD = (
    _COMMON
    + """
local pod, owner, mine, lease_ms, ttl_s = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local tier, capacity, keys, references = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
local life, new = claim(pod, owner, mine, lease_ms)
if not life then return {0, 0, 0} end
local head, held, uses = struct.pack('<I5B', life, tier), {}, {}
local blocks = #keys / 8
local clock = tick(blocks)
for i = blocks, 1, -1 do
  local key = string.sub(keys, i * 8 - 7, i * 8)
  local count = references == '' and 1 or struct.unpack('<I4', references, i * 4 - 3)
  local block = read(prefix .. 'b:' .. key)
  local at = find(block, head)
  if at then
    count = count + struct.unpack('<I2', block, at + 6)
    block = cut(block, at)
  end
  if count > 65535 then return redis.error_reply('KVROUTE more references than can be counted') end
  write(key, block .. head .. struct.pack('<I2', count), ttl_s)
  held[#held + 1] = key
  uses[#uses + 1] = clock - i + 1
  uses[#uses + 1] = key
end
redis.call('ZADD', prefix .. 'used', unpack(uses))
redis.call('SADD', prefix .. 'l:' .. life, unpack(held))
redis.call('EXPIRE', prefix .. 'l:' .. life, ttl_s)
local over = redis.call('ZCARD', prefix .. 'used') - capacity
if over > 0 then evict(over) end
return {life, new, redis.call('ZCARD', prefix .. 'used')}
"""
)

# pod, owner, life, lease_ms, ttl_s, tier, keys -> life or 0, new, holdings ended
REMOVE = (
    _COMMON
    + """
local pod, owner, mine, lease_ms, ttl_s = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local life, new = claim(pod, owner, mine, lease_ms)
if not life then return {0, 0, 0} end
local ended, keys = 0, ARGV[7]
local head, any_tier = struct.pack('<I5B', life, tonumber(ARGV[6])), struct.pack('<I5', life)
for i = 1, #keys / 8 do
  local key = string.sub(keys, i * 8 - 7, i * 8)
  local block = read(prefix .. 'b:' .. key)
  local at = find(block, head)
  if at then
    local count = struct.unpack('<I2', block, at + 6) - 1
    block = cut(block, at)
    if count > 0 then block = block .. head .. struct.pack('<I2', count) else ended = ended + 1 end
    write(key, block, ttl_s)
  end
  -- Also where the server has dropped the block for want of memory.
  if not find(block, any_tier) then redis.call('SREM', prefix .. 'l:' .. life, key) end
end
return {life, new, ended}
"""
)

# pod, owner, life, lease_ms -> life or 0, new, blocks it held
CLEAR = (
    _COMMON
    + """
local pod, owner, mine, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local life, new = claim(pod, owner, mine, lease_ms)
if not life then return {0, 0, 0} end
if new == 1 then return {life, 1, 0} end
local blocks = redis.call('SCARD', prefix .. 'l:' .. life)
bury(life)
life = new_life()
keep(pod, life, owner, lease_ms)
return {life, 0, blocks}
"""
)

# owner, lease_ms, ttl_s, (pod, life) of each view -> life, new of each; life 0: another's, -1: given
# back empty
RENEW = (
    _COMMON
    + """
local owner, lease_ms, ttl_s = ARGV[1], ARGV[2], ARGV[3]
local answer = {}
for i = 4, #ARGV, 2 do
  local pod, mine = ARGV[i], tonumber(ARGV[i + 1])
  local life, holder, deadline_ms = view(pod)
  local new = 0
  if life and life == mine and holder == owner and redis.call('SCARD', prefix .. 'l:' .. life) == 0 then
    if deadline_ms <= now_ms then
      redis.call('HDEL', prefix .. 'pods', pod)
      life = -1
    end
  else
    life, new = claim(pod, owner, mine, lease_ms)
    if life then redis.call('EXPIRE', prefix .. 'l:' .. life, ttl_s) end
  end
  answer[#answer + 1] = life or 0
  answer[#answer + 1] = new or 0
end
return answer
"""
)

# owner, pods... -> nothing; ends the leases of these views
RELEASE = (
    _COMMON
    + """
for i = 2, #ARGV do
  local life, owner = view(ARGV[i])
  if owner == ARGV[1] then keep(ARGV[i], life, owner, -now_ms) end
end
"""
)

# ttl_s, grace_ms, blocks -> blocks swept: of dead lives. Views that nobody kept up for so long die here, and
# uses are forgotten of blocks that the server has dropped.
SWEEP = (
    _COMMON
    + """
local ttl_s, grace_ms, blocks = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for _, name in ipairs({'pods', 'used', 'dead', 'meta'}) do redis.call('EXPIRE', prefix .. name, ttl_s) end
local records = redis.call('HGETALL', prefix .. 'pods')
for i = 1, #records, 2 do
  local life, _, deadline_ms = view(records[i])
  if not life or deadline_ms + grace_ms <= now_ms then
    if life then bury(life) end
    redis.call('HDEL', prefix .. 'pods', records[i])
  end
end
for _, key in ipairs(redis.call('ZRANGE', prefix .. 'used', 0, 63)) do
  if redis.call('EXISTS', prefix .. 'b:' .. key) == 0 then redis.call('ZREM', prefix .. 'used', key) end
end
local life = redis.call('SRANDMEMBER', prefix .. 'dead')
if not life then return 0 end
local swept = redis.call('SPOP', prefix .. 'l:' .. life, blocks)
local head = struct.pack('<I5', tonumber(life))
for _, key in ipairs(swept) do
  local block = read(prefix .. 'b:' .. key)
  local at = find(block, head)
  while at do
    block = cut(block, at)
    at = find(block, head)
  end
  write(key, block, ttl_s)
end
if #swept < blocks then redis.call('SREM', prefix .. 'dead', life) end
-- A life without blocks is work done as well: others may wait behind it.
return math.max(#swept, 1)
"""
)

# ttl_s, keys, the least recently used first -> nothing
TOUCH = (
    _COMMON
    + """
local ttl_s, keys = ARGV[1], ARGV[2]
local blocks = #keys / 8
local clock = tick(blocks)
for i = 1, blocks do
  local key = string.sub(keys, i * 8 - 7, i * 8)
  if redis.call('EXPIRE', prefix .. 'b:' .. key, ttl_s) == 1 then
    redis.call('ZADD', prefix .. 'used', clock - blocks + i, key)
  end
end
"""
)

# keys, pods... -> time in ms, the records of the pods, entries of each block as u32, all entries
READ = (
    _COMMON
    + """
local keys = ARGV[1]
local names, records, entries = {}, {}, {}
for i = 1, #keys, 8 do names[#names + 1] = prefix .. 'b:' .. string.sub(keys, i, i + 7) end
for first = 2, #ARGV, 1024 do
  local found = redis.call('HMGET', prefix .. 'pods', unpack(ARGV, first, math.min(#ARGV, first + 1023)))
  for i = 1, #found do records[#records + 1] = found[i] end
end
local blocks = redis.call('MGET', unpack(names))
for i, block in ipairs(blocks) do
  blocks[i] = checked(block)
  entries[i] = struct.pack('<I4', #blocks[i] / 8)
end
return {now_ms, records, table.concat(entries), table.concat(blocks)}
"""
)

# blocks -> blocks evicted
EVICT = _COMMON + "return evict(tonumber(ARGV[1]))"

# -> blocks, holdings, evicted blocks
STATS = (
    _COMMON
    + """
local holdings = 0
local records = redis.call('HGETALL', prefix .. 'pods')
for i = 1, #records, 2 do
  local life, _, deadline_ms = view(records[i])
  if life and deadline_ms > now_ms then holdings = holdings + redis.call('SCARD', prefix .. 'l:' .. life) end
end
local evicted = redis.call('HGET', prefix .. 'meta', 'evicted') or 0
return {redis.call('ZCARD', prefix .. 'used'), holdings, tonumber(evicted)}
"""
)
